"""Splits the text of a response into reasoning, content and tool calls.

Without parsers all text is content. With a tool parser or a reasoning parser, named by the operator as for vLLM's own
server, vLLM's parsers split it; vLLM is imported only then.
"""

import hashlib
from collections.abc import Sequence
from typing import Any, Final, Protocol

import msgspec

from ebbtide.errors import InvalidRequest

#: Bytes of a call's id.
_ID_BYTES: Final = 12


class ParserNames(msgspec.Struct, frozen=True):
    """vLLM's names of a model's parsers; empty: none."""

    tool: str = ""
    reasoning: str = ""


class ToolCallDelta(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a tool call: the first has `call_id` and `name`, the arguments of all parts are joined."""

    index: int
    call_id: str = ""
    name: str = ""
    arguments: str = ""


class OutputDelta(msgspec.Struct, frozen=True):
    """What a part of the text, or all of it, means."""

    reasoning: str = ""
    content: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()


class OutputParser(Protocol):
    """Parses one response, either as it comes (`push`, then `end`) or as a whole."""

    #: Whether the detokenizer shall leave out special tokens. Parsers that find their marks in the text need them.
    skip_special: bool

    def push(self, text: str, ids: Sequence[int]) -> OutputDelta:
        """Parses the next text, which `ids` completed."""
        ...

    def end(self) -> OutputDelta:
        """Returns what was held back."""
        ...

    def whole(self, text: str, ids: Sequence[int]) -> OutputDelta:
        """Parses a response that is complete, in which each call is one part."""
        ...


class OutputParsers(Protocol):
    """Makes the parsers of one model's responses. Any thread may call it."""

    def parser(
        self,
        *,
        tools: list[dict[str, Any]] | None,
        tool_choice: str,
        template_options: dict[str, Any],
        prompt_ids: Sequence[int],
        call_seed: str,
    ) -> OutputParser:
        """Makes the parser of one response.

        `tool_choice`: `auto`, or `none` for no calls. `call_seed` names the response, such as its rollout: the ids of
        its calls follow from it, so that another gateway gives them the same ids.
        """
        ...


class PlainOutput:
    """Takes all text for content."""

    skip_special = True

    def push(self, text: str, ids: Sequence[int]) -> OutputDelta:  # noqa: ARG002  # the protocol's
        return OutputDelta(content=text)

    def end(self) -> OutputDelta:
        return OutputDelta()

    def whole(self, text: str, ids: Sequence[int]) -> OutputDelta:  # noqa: ARG002  # the protocol's
        return OutputDelta(content=text)


class PlainOutputs:
    """Of a model without parsers."""

    def parser(
        self,
        *,
        tools: list[dict[str, Any]] | None,  # noqa: ARG002  # the protocol's
        tool_choice: str,  # noqa: ARG002
        template_options: dict[str, Any],  # noqa: ARG002
        prompt_ids: Sequence[int],  # noqa: ARG002
        call_seed: str,  # noqa: ARG002
    ) -> OutputParser:
        return PlainOutput()


def load_output_parsers(tokenizer: Any, names: ParserNames) -> OutputParsers:
    """Makes a model's parsers. With names this imports vLLM, which takes many seconds and a gigabyte of memory.

    Raises `InvalidRequest` naming `tool_parser` or `reasoning_parser` if vLLM does not know it, if it does not fit the
    tokenizer, or if vLLM is not installed.
    """
    if names == ParserNames():
        return PlainOutputs()
    try:
        from ebbtide.gateway.text.vllm_output_parsers import VllmOutputParsers
    except ImportError as error:
        field = "tool_parser" if names.tool else "reasoning_parser"
        raise InvalidRequest(f"needs vllm beside the gateway: {error}", field=field) from error
    return VllmOutputParsers(tokenizer, names)


def call_id(seed: str, index: int) -> str:
    """The id of a response's tool call number `index`."""
    return f"call_{hashlib.blake2b(f'{seed} {index}'.encode(), digest_size=_ID_BYTES).hexdigest()}"
