"""Writes the answers of /v1/messages."""

from collections.abc import Sequence
from typing import Any

import msgspec

from ebbtide.errors import EbbtideError
from ebbtide.gateway.dialects.dialect import AnswerContext
from ebbtide.gateway.dialects.error_shapes import anthropic_error, status_of
from ebbtide.gateway.dialects.event_lines import named_event
from ebbtide.gateway.dialects.token_shapes import TokenTally
from ebbtide.gateway.generation.choice_delta import ChoiceDelta, ChoiceFinish, ChoiceResult
from ebbtide.gateway.text.output_parsers import ToolCallDelta


class MessageAnswer:
    """The answer to one request. It has one completion, and one block of it is open at a time."""

    def __init__(self, context: AnswerContext) -> None:
        self._context = context
        self._tally = TokenTally(context.played.prompts)
        self._finish: ChoiceFinish | None = None
        self._index = -1  # of the last block
        self._open = ""  # the kind of the open block; a tool call's has its index
        self._called = False

    def begin(self) -> bytes:
        message = self._message([]) | {"stop_reason": None, "stop_sequence": None}
        return named_event("message_start", {"type": "message_start", "message": message})

    def events(self, delta: ChoiceDelta) -> bytes:
        self._tally.add(delta)
        self._finish = delta.finish or self._finish
        lines = []
        if delta.reasoning:
            lines.append(self._enter("thinking", {"type": "thinking", "thinking": "", "signature": ""}))
            lines.append(self._delta({"type": "thinking_delta", "thinking": delta.reasoning}))
        if delta.text:
            lines.append(self._enter("text", {"type": "text", "text": ""}))
            lines.append(self._delta({"type": "text_delta", "text": delta.text}))
        for part in delta.tool_calls:
            lines.append(self._enter(f"tool_use {part.index}", self._tool_block(part)))
            if part.arguments:
                lines.append(self._delta({"type": "input_json_delta", "partial_json": part.arguments}))
        return b"".join(lines)

    def end(self) -> bytes:
        reason = {"stop_reason": self._reason(), "stop_sequence": self._stop_sequence()}
        usage = {"output_tokens": self._tally.completion_tokens, "input_tokens": self._tally.prompt_tokens}
        last = {"type": "message_delta", "delta": reason, "usage": usage} | self._tally.stamps()
        return (
            self._close() + named_event("message_delta", last) + named_event("message_stop", {"type": "message_stop"})
        )

    def failure(self, error: EbbtideError) -> bytes:
        return named_event("error", anthropic_error(status_of(error), error, self._context.request_id))

    def idle(self) -> bytes:
        return named_event("ping", {"type": "ping"})

    def whole(self, results: Sequence[ChoiceResult]) -> dict[str, Any]:
        (result,) = results
        self._tally.add_tokens(result.tokens)
        self._finish, self._called = result.finish, bool(result.calls)
        blocks: list[dict[str, Any]] = []
        if result.reasoning:
            blocks.append({"type": "thinking", "thinking": result.reasoning, "signature": ""})
        if result.text or not result.calls:
            blocks.append({"type": "text", "text": result.text})
        blocks += [
            {"type": "tool_use", "id": call["id"], "name": call["name"], "input": _input(call["arguments"])}
            for call in result.calls
        ]
        ended = {"stop_reason": self._reason(), "stop_sequence": self._stop_sequence()}
        return self._message(blocks) | ended | self._tally.stamps()

    def _message(self, blocks: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": f"msg_{self._context.request_id}",
            "type": "message",
            "role": "assistant",
            "model": self._context.model,
            "content": blocks,
            "usage": {"input_tokens": self._tally.prompt_tokens, "output_tokens": self._tally.completion_tokens},
        }

    def _tool_block(self, part: ToolCallDelta) -> dict[str, Any]:
        self._called = True
        call_id = part.call_id or f"toolu_{self._context.request_id}_{part.index}"
        return {"type": "tool_use", "id": call_id, "name": part.name, "input": {}}

    def _enter(self, kind: str, block: dict[str, Any]) -> bytes:
        if self._open == kind:
            return b""
        closed = self._close()
        self._open = kind
        self._index += 1
        begun = {"type": "content_block_start", "index": self._index, "content_block": block}
        return closed + named_event("content_block_start", begun)

    def _close(self) -> bytes:
        if not self._open:
            return b""
        self._open = ""
        return named_event("content_block_stop", {"type": "content_block_stop", "index": self._index})

    def _delta(self, delta: dict[str, Any]) -> bytes:
        event = {"type": "content_block_delta", "index": self._index, "delta": delta}
        return named_event("content_block_delta", event)

    def _reason(self) -> str:
        if self._finish is not None and self._finish.reason == "length":
            return "max_tokens"  # also where the context cut it: clients do not know the reason for that alone
        if self._stop_sequence() is not None:
            return "stop_sequence"
        return "tool_use" if self._called else "end_turn"

    def _stop_sequence(self) -> str | None:
        stop = self._finish.stop if self._finish else None
        return stop if isinstance(stop, str) else None


def _input(arguments: str) -> dict[str, Any]:
    """The arguments as an object. What a model wrote that is none stays readable."""
    try:
        return msgspec.json.decode(arguments or "{}", type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError):
        return {"malformed_arguments": arguments}
