"""Writes the answers of /v1/responses."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ebbtide.errors import EbbtideError
from ebbtide.gateway.dialects.agents.response_items import Event, ResponseItems
from ebbtide.gateway.dialects.dialect import AnswerContext
from ebbtide.gateway.dialects.error_shapes import openai_error, status_of
from ebbtide.gateway.dialects.event_lines import KEEP_ALIVE, named_event
from ebbtide.gateway.dialects.token_shapes import TokenTally, chat_logprobs
from ebbtide.gateway.generation.choice_delta import ChoiceDelta, ChoiceFinish, ChoiceResult
from ebbtide.gateway.text.output_parsers import ToolCallDelta
from ebbtide.types.tokens import TOKEN, TokenArray


class ResponseAnswer:
    """The answer to one request. It has one completion."""

    def __init__(
        self,
        context: AnswerContext,
        *,
        echoed: dict[str, Any],
        namespaces: Mapping[str, str],
        logprobs: bool,
        reasoning: bool,
    ) -> None:
        """`echoed`: fields of the request that the answer repeats; `namespaces`: of functions, by their names."""
        self._context, self._echoed = context, echoed
        self._logprobs, self._reasoning = logprobs, reasoning
        self._items = ResponseItems(context.request_id, namespaces)
        self._tally = TokenTally(context.played.prompts)
        self._finish: ChoiceFinish | None = None
        self._sequence = 0
        self._unnamed: list[TokenArray] = []  # tokens of a stream that came without text

    def begin(self) -> bytes:
        begun = self._response("in_progress")
        return self._lines([{"type": f"response.{kind}", "response": begun} for kind in ("created", "in_progress")])

    def events(self, delta: ChoiceDelta) -> bytes:
        self._tally.add(delta)
        self._finish = delta.finish or self._finish
        events: list[Event] = []
        if delta.reasoning and self._reasoning:
            events += self._items.reasoning(delta.reasoning)
        self._unnamed.append(delta.tokens)
        if delta.text:
            events += self._items.text(delta.text, self._named_since())
        for part in delta.tool_calls:
            events += self._items.call(part)
        return self._lines(events)

    def end(self) -> bytes:
        events: list[Event] = []
        if self._logprobs and self._items.writes_text and (rest := self._named_since()):
            events += self._items.text("", rest)
        events += self._items.close()
        status = self._status()
        return self._lines([*events, {"type": f"response.{status}", "response": self._response(status)}])

    def failure(self, error: EbbtideError) -> bytes:
        told = openai_error(status_of(error), error, self._context.request_id)["error"]
        failed = self._response("failed") | {"error": {"code": "server_error", "message": told["message"]}}
        event = {"type": "error", "code": str(told["code"]), "message": told["message"], "param": told["param"]}
        return self._lines([{"type": "response.failed", "response": failed}, event])

    def idle(self) -> bytes:
        return KEEP_ALIVE

    def whole(self, results: Sequence[ChoiceResult]) -> dict[str, Any]:
        (result,) = results
        tokens = result.tokens
        self._tally.add_tokens(tokens)
        self._finish = result.finish
        if result.reasoning and self._reasoning:
            self._items.reasoning(result.reasoning)
        if result.text or not result.calls:
            self._items.text(result.text, self._named(tokens))
        for index, call in enumerate(result.calls):
            part = ToolCallDelta(index=index, call_id=call["id"], name=call["name"], arguments=call["arguments"])
            self._items.call(part)
        self._items.close()
        return self._response(self._status())

    def _named(self, tokens: TokenArray) -> list[Any]:
        if not self._logprobs:
            return []
        found: list[Any] = chat_logprobs(tokens, self._context.token_text)["content"]
        return found

    def _named_since(self) -> list[Any]:
        """Logprobs of the tokens since the last text: of half a character, say, or of what a stop string may begin."""
        tokens, self._unnamed = np.concatenate(self._unnamed) if self._unnamed else np.empty(0, TOKEN), []
        return self._named(tokens)

    def _status(self) -> str:
        return "incomplete" if self._finish and self._finish.reason == "length" else "completed"

    def _response(self, status: str) -> dict[str, Any]:
        usage = self._tally.usage()
        ended = status in ("completed", "incomplete")
        return {
            "id": f"resp_{self._context.request_id}",
            "object": "response",
            "created_at": self._context.created,
            "model": self._context.model,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": list(self._items.output),
            "parallel_tool_calls": True,
            "store": False,
            "truncation": "disabled",
            "text": {"format": {"type": "text"}},
            **self._echoed,
            "usage": _usage(usage) if ended else None,
            **(self._tally.stamps() if ended else {}),
        }

    def _lines(self, events: Sequence[Event]) -> bytes:
        lines = []
        for event in events:
            lines.append(named_event(event["type"], event | {"sequence_number": self._sequence}))
            self._sequence += 1
        return b"".join(lines)


def _usage(usage: dict[str, int]) -> dict[str, Any]:
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage["total_tokens"],
    }
