"""Splits the text of a response into reasoning, content and tool calls.

Without parsers all text is content. With a tool parser or a reasoning parser, named by the operator as for vLLM's own
server, vLLM's parsers split it; vLLM is imported only then.
"""

import hashlib
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from ebbtide import telemetry
from ebbtide.errors import InvalidRequest

_log: Final = telemetry.get_logger(__name__)
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


def load_output_parsers(tokenizer: Any, names: ParserNames) -> "OutputParsers | None":
    """Makes a model's parsers; None without names. Else this imports vLLM: many seconds, and a gigabyte of memory.

    Raises `InvalidRequest` naming `tool_parser` or `reasoning_parser` if vLLM does not know it, if it does not fit the
    tokenizer, or if vLLM is not installed.
    """
    if names == ParserNames():
        return None
    try:
        return OutputParsers(tokenizer, names)
    except ImportError as error:
        field = "tool_parser" if names.tool else "reasoning_parser"
        raise InvalidRequest(f"needs vllm in the gateway's environment: {error}", field=field) from error


def call_id(seed: str, index: int) -> str:
    """The id of a response's tool call number `index`."""
    return f"call_{hashlib.blake2b(f'{seed} {index}'.encode(), digest_size=_ID_BYTES).hexdigest()}"


class OutputParsers:
    """Makes the parsers of one model's responses: of vLLM's tool parser and reasoning parser, of which either may be
    missing. Any thread may call it.
    """

    def __init__(self, tokenizer: Any, names: ParserNames) -> None:
        """Imports vLLM. Raises `InvalidRequest` naming `tool_parser` or `reasoning_parser`, and `ImportError`."""
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.parser.parser_manager import ParserManager
        from vllm.tokenizers.hf import get_cached_tokenizer

        self._request = ChatCompletionRequest
        tokenizer = get_cached_tokenizer(tokenizer)  # each parser asks for the whole vocabulary
        self._tokenizer, self._tools = tokenizer, bool(names.tool)
        for field, name, only in (
            ("tool_parser", names.tool, {"tool_parser_name": names.tool}),
            ("reasoning_parser", names.reasoning, {"reasoning_parser_name": names.reasoning}),
        ):
            if name:
                _parser_class(ParserManager, field, tokenizer, only)
        both = {"tool_parser_name": names.tool or None, "reasoning_parser_name": names.reasoning or None}
        self._class = _parser_class(ParserManager, "tool_parser", tokenizer, both)

    def parser(
        self,
        *,
        tools: list[dict[str, Any]] | None,
        tool_choice: str,
        template_options: dict[str, Any],
        prompt_ids: Sequence[int],
        call_seed: str,
    ) -> "OutputParser":
        """Makes the parser of one response.

        `tool_choice`: `auto`, or `none` for no calls. `call_seed` names the response, such as its rollout: the ids of
        its calls follow from it, so that another gateway gives them the same ids. Raises `InvalidRequest` naming
        `tools`.
        """
        choice = {"tools": tools, "tool_choice": tool_choice} if tools else {}
        try:
            request = self._request(
                model="", messages=[], chat_template_kwargs=dict(template_options), include_reasoning=True, **choice
            )
        except ValueError as error:
            raise InvalidRequest(f"vLLM's parsers refuse them: {error}", field="tools") from None
        made = self._class(self._tokenizer, request.tools, chat_template_kwargs=dict(template_options))
        request = made.adjust_request(request)
        return OutputParser(made, request, prompt_ids=prompt_ids, call_seed=call_seed, tools=self._tools)


class OutputParser:
    """Parses one response, either as it comes (`push`, then `end`) or as a whole. If vLLM's parser fails, the rest of
    the text is content: no response is lost by it.
    """

    #: Whether the detokenizer shall leave out special tokens. Parsers that find their marks in the text need them.
    skip_special: bool

    def __init__(self, parser: Any, request: Any, *, prompt_ids: Sequence[int], call_seed: str, tools: bool) -> None:
        self._parser, self._request, self._tools = parser, request, tools
        self._prompt_ids = prompt_ids if isinstance(prompt_ids, list) else [int(one) for one in prompt_ids]
        self._parser.set_prompt_token_ids(self._prompt_ids)
        self._seed, self._calls, self._failed = call_seed, set[int](), False
        self.skip_special = bool(request.skip_special_tokens)

    def push(self, text: str, ids: Sequence[int]) -> OutputDelta:
        """What the next text means, which `ids` completed."""
        if self._failed:
            return OutputDelta(content=text)
        return self._parsed(text, [int(one) for one in ids], finished=False)

    def end(self) -> OutputDelta:
        """What was held back."""
        if self._failed:
            return OutputDelta()
        made = self._parsed("", [], finished=True)
        tool_parser = self._parser.tool_parser if self._calls and not made.tool_calls else None
        # vLLM's server appends what is left to the last part, which was returned here before the end was known.
        if tool_parser is not None and (left := tool_parser.get_remaining_unstreamed_args()):
            rest = (ToolCallDelta(index=max(self._calls), arguments=left),)
            return OutputDelta(made.reasoning, made.content, rest)
        return made

    def whole(self, text: str, ids: Sequence[int]) -> OutputDelta:
        """What a response means that is complete. Each call is one part of it."""
        try:
            reasoning, content, calls = self._parser.parse(
                text, self._request, enable_auto_tools=self._tools, model_output_token_ids=[int(one) for one in ids]
            )
        except Exception:  # noqa: BLE001  # parsers of others
            _log.exception("parsing a response failed: all of it is content")
            return OutputDelta(content=text)
        made = [
            ToolCallDelta(index=index, call_id=self._id(one.id, index), name=one.name, arguments=one.arguments)
            for index, one in enumerate(calls or ())
        ]
        return OutputDelta(reasoning or "", content or "", tuple(made))

    def _parsed(self, text: str, ids: list[int], *, finished: bool) -> OutputDelta:
        try:
            delta = self._parser.parse_delta(
                text, ids, self._request, prompt_token_ids=self._prompt_ids, finished=finished
            )
        except Exception:  # noqa: BLE001  # parsers of others
            _log.exception("parsing a response failed: the rest of it is content")
            self._failed = True
            return OutputDelta(content=text)
        if delta is None:
            return OutputDelta()
        return OutputDelta(delta.reasoning or "", delta.content or "", tuple(map(self._call, delta.tool_calls or ())))

    def _call(self, delta: Any) -> ToolCallDelta:
        self._calls.add(delta.index)
        function = delta.function
        name, arguments = (function.name or "", function.arguments or "") if function else ("", "")
        given = self._id(delta.id, delta.index) if name else ""
        return ToolCallDelta(index=delta.index, call_id=given, name=name, arguments=arguments)

    def _id(self, given: str | None, index: int) -> str:
        """Kimi's models write ids themselves, `functions.NAME:NUMBER`; the others' are drawn at random by vLLM."""
        return given if given and given.startswith("functions.") else call_id(self._seed, index)


def _parser_class(manager: Any, field: str, tokenizer: Any, names: dict[str, Any]) -> Any:
    try:
        return manager.get_parser(**names, enable_auto_tools=True, tokenizer=tokenizer)
    except Exception as error:  # vLLM has no exception of its own for it
        raise InvalidRequest(f"{error}", field=field) from error
