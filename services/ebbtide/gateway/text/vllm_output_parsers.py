"""Parses responses by vLLM's tool parsers and reasoning parsers, as vLLM's own server does."""

from collections.abc import Sequence
from typing import Any, Final

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.parser.parser_manager import ParserManager
from vllm.tokenizers.hf import get_cached_tokenizer

from ebbtide import telemetry
from ebbtide.errors import InvalidRequest
from ebbtide.gateway.text.output_parsers import OutputDelta, ParserNames, ToolCallDelta, call_id

_log: Final = telemetry.get_logger(__name__)


class VllmOutputParsers:
    """Makes parsers of one tool parser and one reasoning parser, of which either may be missing."""

    def __init__(self, tokenizer: Any, names: ParserNames) -> None:
        """Raises `InvalidRequest` naming `tool_parser` or `reasoning_parser`."""
        tokenizer = get_cached_tokenizer(tokenizer)  # each parser asks for the whole vocabulary
        self._tokenizer, self._tools = tokenizer, bool(names.tool)
        for field, name, only in (
            ("tool_parser", names.tool, {"tool_parser_name": names.tool}),
            ("reasoning_parser", names.reasoning, {"reasoning_parser_name": names.reasoning}),
        ):
            if name:
                _parser_class(field, tokenizer, only)
        both = {"tool_parser_name": names.tool or None, "reasoning_parser_name": names.reasoning or None}
        self._class = _parser_class("tool_parser", tokenizer, both)

    def parser(
        self,
        *,
        tools: list[dict[str, Any]] | None,
        tool_choice: str,
        template_options: dict[str, Any],
        prompt_ids: Sequence[int],
        call_seed: str,
    ) -> "VllmOutputParser":
        """As `OutputParsers.parser`. Raises `InvalidRequest` naming `tools`."""
        choice = {"tools": tools, "tool_choice": tool_choice} if tools else {}
        try:
            request = ChatCompletionRequest(
                model="", messages=[], chat_template_kwargs=dict(template_options), include_reasoning=True, **choice
            )
        except ValueError as error:
            raise InvalidRequest(f"vLLM's parsers refuse them: {error}", field="tools") from None
        made = self._class(self._tokenizer, request.tools, chat_template_kwargs=dict(template_options))
        request = made.adjust_request(request)
        return VllmOutputParser(made, request, prompt_ids=prompt_ids, call_seed=call_seed, tools=self._tools)


class VllmOutputParser:
    """Parses one response. If the parser fails, the rest of the text is content: no response is lost by it."""

    def __init__(self, parser: Any, request: Any, *, prompt_ids: Sequence[int], call_seed: str, tools: bool) -> None:
        self._parser, self._request, self._tools = parser, request, tools
        self._prompt_ids = prompt_ids if isinstance(prompt_ids, list) else [int(one) for one in prompt_ids]
        self._parser.set_prompt_token_ids(self._prompt_ids)
        self._seed, self._calls, self._failed = call_seed, set[int](), False
        self.skip_special = bool(request.skip_special_tokens)

    def push(self, text: str, ids: Sequence[int]) -> OutputDelta:
        if self._failed:
            return OutputDelta(content=text)
        return self._parsed(text, [int(one) for one in ids], finished=False)

    def end(self) -> OutputDelta:
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


def _parser_class(field: str, tokenizer: Any, names: dict[str, Any]) -> Any:
    try:
        return ParserManager.get_parser(**names, enable_auto_tools=True, tokenizer=tokenizer)
    except Exception as error:  # vLLM has no exception of its own for it
        raise InvalidRequest(f"{error}", field=field) from error
