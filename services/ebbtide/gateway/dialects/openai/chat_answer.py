"""Writes the answers of /v1/chat/completions."""

from collections.abc import Sequence
from typing import Any

from ebbtide.gateway.dialects.dialect import AnswerContext
from ebbtide.gateway.dialects.event_lines import DONE, data_event
from ebbtide.gateway.dialects.openai_events import OpenAIEvents
from ebbtide.gateway.dialects.token_shapes import TokenTally, chat_logprobs, token_name, version_spans
from ebbtide.gateway.generation.choice_delta import ChoiceDelta, ChoiceFinish, ChoiceResult
from ebbtide.gateway.text.output_parsers import ToolCallDelta
from ebbtide.types.tokens import TokenArray


class ChatAnswer(OpenAIEvents):
    """The answer to one chat."""

    def __init__(
        self,
        context: AnswerContext,
        *,
        logprobs: bool,
        token_ids: bool,
        names_as_ids: bool,
        reasoning: bool,
        usage: bool,
        running_usage: bool,
    ) -> None:
        super().__init__(context)
        self._logprobs, self._token_ids, self._reasoning = logprobs, token_ids, reasoning
        self._usage, self._running_usage = usage, running_usage
        self._tally = TokenTally(context.played.prompts)
        self._name = token_name(context.token_text, as_ids=names_as_ids)
        self._begun: set[int] = set()
        self._called: set[int] = set()

    def begin(self) -> bytes:
        return b""

    def events(self, delta: ChoiceDelta) -> bytes:
        self._tally.add(delta)
        if delta.tool_calls:
            self._called.add(delta.index)
        choice = {"index": delta.index, "delta": self._message_delta(delta)}
        choice |= self._tail(delta.tokens, delta.finish, called=delta.index in self._called)
        chunk = self._frame("chat.completion.chunk", [choice])
        if self._token_ids and not self._begun:
            chunk["prompt_token_ids"] = self._context.played.prompt_of(0)
        if delta.finish is not None:
            chunk |= self._tally.stamps()
        if self._running_usage:
            chunk["usage"] = self._tally.usage()
        self._begun.add(delta.index)
        return data_event(chunk)

    def end(self) -> bytes:
        if not self._usage:
            return DONE
        return data_event(self._frame("chat.completion.chunk", []) | {"usage": self._tally.usage()}) + DONE

    def whole(self, results: Sequence[ChoiceResult]) -> dict[str, Any]:
        choices = []
        for result in results:
            tokens = result.tokens
            self._tally.add_tokens(tokens)
            choice = {"index": result.index, "message": self._message(result)}
            choice |= self._tail(tokens, result.finish, called=bool(result.calls))
            if self._token_ids:
                choice["weight_versions"] = version_spans(tokens)
            choices.append(choice)
        whole = self._frame("chat.completion", choices) | {"usage": self._tally.usage()} | self._tally.stamps()
        if self._token_ids:
            whole["prompt_token_ids"] = self._context.played.prompt_of(0)
        return whole

    def _frame(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": f"chatcmpl-{self._context.request_id}",
            "object": kind,
            "created": self._context.created,
            "model": self._context.model,
            "choices": choices,
        }

    def _tail(self, tokens: TokenArray, finish: ChoiceFinish | None, *, called: bool) -> dict[str, Any]:
        """What chunks and whole choices have in common."""
        reason = finish.reason if finish else None
        tail: dict[str, Any] = {
            "logprobs": chat_logprobs(tokens, self._name) if self._logprobs else None,
            "finish_reason": "tool_calls" if called and reason == "stop" else reason,
            "stop_reason": finish.stop if finish else None,
        }
        if self._token_ids:
            tail["token_ids"] = tokens["id"].tolist()
        return tail

    def _message_delta(self, delta: ChoiceDelta) -> dict[str, Any]:
        message: dict[str, Any] = {} if delta.index in self._begun else {"role": "assistant", "content": ""}
        if delta.text:
            message["content"] = delta.text
        if delta.reasoning and self._reasoning:
            message["reasoning"] = delta.reasoning
        if delta.tool_calls:
            message["tool_calls"] = [_call_delta(call) for call in delta.tool_calls]
        return message

    def _message(self, result: ChoiceResult) -> dict[str, Any]:
        calls = [_call(call) for call in result.calls]
        message: dict[str, Any] = {"role": "assistant", "content": result.text or (None if calls else "")}
        if result.reasoning and self._reasoning:
            message["reasoning"] = result.reasoning
        return message | ({"tool_calls": calls} if calls else {})


def _call_delta(call: ToolCallDelta) -> dict[str, Any]:
    function: dict[str, Any] = {"arguments": call.arguments}
    if not call.call_id:
        return {"index": call.index, "function": function}
    return {"index": call.index, "id": call.call_id, "type": "function", "function": {"name": call.name} | function}


def _call(call: dict[str, Any]) -> dict[str, Any]:
    function = {"name": call["name"], "arguments": call["arguments"]}
    return {"id": call["id"], "type": "function", "function": function}
