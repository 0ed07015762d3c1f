"""Says what the gateway needs of a model's tokenizer, chat template and parsers."""

from collections.abc import Collection, Sequence
from typing import Any, Protocol

from ebbtide.gateway.generation.choice_delta import ToolCallDelta


class TokenDecoder(Protocol):
    """Turns the tokens of one completion into text, as they come."""

    def push(self, ids: Sequence[int]) -> str:
        """The text that is complete by now."""

    def end(self) -> str:
        """The rest."""


class ParsedText(Protocol):
    """What a parser made of a piece of text."""

    @property
    def reasoning(self) -> str: ...
    @property
    def content(self) -> str: ...
    @property
    def tool_calls(self) -> Sequence[ToolCallDelta]: ...


class TextParser(Protocol):
    """Parts the text of one completion into reasoning, content and tool calls."""

    def push(self, text: str, ids: Sequence[int]) -> ParsedText: ...

    def end(self) -> ParsedText: ...


class TextModel(Protocol):
    """One model folder. Its calls may take some milliseconds, and may come from any thread."""

    @property
    def eos_ids(self) -> tuple[int, ...]: ...
    @property
    def vocabulary(self) -> int:
        """Token ids are below it."""

    @property
    def context(self) -> int:
        """Most tokens of prompt and response together."""

    @property
    def parses_tools(self) -> bool:
        """Whether a parser of tool calls is configured."""

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None,
        template_options: dict[str, Any],
        generate: bool = True,
    ) -> str:
        """Raises `InvalidRequest` naming `messages`."""

    def encode(self, text: str, *, special: bool) -> list[int]: ...

    def detokenizer(
        self, prompt_ids: Sequence[int], *, skip_special: bool, hidden_ends: Collection[int] = ()
    ) -> TokenDecoder:
        """`hidden_ends`: ids that have no text at the completion's very end."""

    def token_text(self, token_id: int) -> str:
        """The text of one id alone."""

    def parser(
        self, prompt_ids: Sequence[int], *, tools: Sequence[dict[str, Any]], reasoning: bool
    ) -> TextParser | None:
        """A parser for one completion; None if all of its text is content."""
