"""Applies a model's own chat template to messages."""

from collections.abc import Mapping
from typing import Any, Final

from ebbtide.errors import InvalidRequest
from ebbtide.gateway.text.template_messages import template_messages
from ebbtide.gateway.text.template_sandbox import TemplateSandbox

#: Variables of every template, which options of a request cannot replace.
_RESERVED: Final = frozenset({"messages", "tools", "documents", "add_generation_prompt"})


class ChatTemplate:
    """The template of one model, or its lack."""

    def __init__(
        self, template: str | Mapping[str, str] | None, special: Mapping[str, str], sandbox: TemplateSandbox
    ) -> None:
        """`template`: Jinja, or several by name (`default`, `tool_use`). `special`: such as `bos_token` -> text."""
        self._template, self._special, self._sandbox = template, dict(special), sandbox

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None,
        options: Mapping[str, Any],
        generate: bool,
    ) -> str:
        """Returns the text of `messages`, with the opening of a response if `generate`. Blocks some milliseconds.

        `options` are further variables of the template. Raises `InvalidRequest` naming `messages`,
        `chat_template_kwargs` or `model`, and what `TemplateSandbox.render` raises.
        """
        if taken := sorted(_RESERVED.intersection(options)):
            raise InvalidRequest(f"{taken[0]} is a field of its own", field="chat_template_kwargs")
        variables = {
            **self._special,
            **options,
            "messages": template_messages(messages),
            "tools": tools or None,
            "documents": None,
            "add_generation_prompt": generate,
        }
        return self._sandbox.render(self._chosen(tools=bool(tools)), variables)

    def _chosen(self, *, tools: bool) -> str:
        template = self._template
        if isinstance(template, Mapping):
            template = template.get("tool_use" if tools and "tool_use" in template else "default")
        if not template:
            raise InvalidRequest("the model has no chat template: send its text to /v1/completions", field="messages")
        return template
