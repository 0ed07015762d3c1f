"""Says what the gateway needs of a model's tokenizer, chat template and parsers."""

from collections.abc import Collection, Sequence
from typing import Any, Protocol

from ebbtide.gateway.text.model_text import ModelText
from ebbtide.gateway.text.output_parsers import OutputParser


class TokenDecoder(Protocol):
    """Turns the tokens of one completion into text, as they come."""

    def push(self, ids: Sequence[int]) -> str:
        """The text that is complete by now."""
        ...

    def end(self) -> str:
        """The rest."""
        ...


class TextModel(Protocol):
    """One model folder. Its calls may take some milliseconds, and may come from any thread."""

    @property
    def text(self) -> ModelText:
        """Its tokenizer and template alone."""
        ...

    @property
    def eos_ids(self) -> tuple[int, ...]: ...
    @property
    def vocabulary(self) -> int:
        """Token ids are below it."""
        ...

    @property
    def context(self) -> int:
        """Most tokens of prompt and response together."""
        ...

    @property
    def parses_tools(self) -> bool:
        """Whether a parser of tool calls is configured."""
        ...

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None,
        template_options: dict[str, Any],
        generate: bool = True,
    ) -> str:
        """Raises `InvalidRequest` naming `messages`."""
        ...

    def encode(self, text: str, *, special: bool) -> list[int]: ...

    def detokenizer(
        self, prompt_ids: Sequence[int], *, skip_special: bool, hidden_ends: Collection[int] | None = None
    ) -> TokenDecoder:
        """`hidden_ends`: ids that have no text at the completion's very end."""
        ...

    def token_text(self, token_id: int) -> str:
        """The text of one id alone."""
        ...

    def parser(
        self,
        *,
        tools: list[dict[str, Any]] | None,
        tool_choice: str,
        template_options: dict[str, Any],
        prompt_ids: Sequence[int],
        call_seed: str,
    ) -> OutputParser:
        """A parser for one completion."""
        ...
