"""Builds the output items of one response, and the events that tell of them."""

from collections.abc import Mapping
from typing import Any

from ebbtide.gateway.text.output_parsers import ToolCallDelta

Event = dict[str, Any]


class ResponseItems:
    """One item is open at a time: reasoning, a message, or a function call. `output` has those that are closed."""

    def __init__(self, request_id: str, namespaces: Mapping[str, str]) -> None:
        """`namespaces`: of functions, by their names."""
        self._request_id, self._namespaces = request_id, namespaces
        self.output: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None
        self._call = -1  # the index of the open function call
        self._parts: list[str] = []
        self._logprobs: list[Any] = []

    @property
    def writes_text(self) -> bool:
        """Whether the open item is a message."""
        return self._open is not None and self._open["type"] == "message"

    def reasoning(self, text: str) -> list[Event]:
        events = self._enter("reasoning", "rs")
        self._parts.append(text)
        return [*events, self._event("reasoning_text.delta", content_index=0, delta=text)]

    def text(self, text: str, logprobs: list[Any]) -> list[Event]:
        events = self._enter("message", "msg")
        self._parts.append(text)
        self._logprobs += logprobs
        return [*events, self._event("output_text.delta", content_index=0, delta=text, logprobs=logprobs)]

    def call(self, part: ToolCallDelta) -> list[Event]:
        events = self._enter_call(part)
        if part.arguments:
            self._parts.append(part.arguments)
            events.append(self._event("function_call_arguments.delta", delta=part.arguments))
        return events

    def close(self) -> list[Event]:
        """Close the open item."""
        item, text = self._open, "".join(self._parts)
        if item is None:
            return []
        events = []
        if item["type"] == "function_call":
            item["arguments"] = text
            events.append(self._event("function_call_arguments.done", arguments=text))
        else:
            part = self._part(text)
            kind = "output_text" if item["type"] == "message" else "reasoning_text"
            logprobs = {"logprobs": self._logprobs} if item["type"] == "message" else {}
            events.append(self._event(f"{kind}.done", content_index=0, text=text, **logprobs))
            events.append(self._event("content_part.done", content_index=0, part=part))
            item["content"] = [part]
        item["status"] = "completed"
        done = {"type": "response.output_item.done", "output_index": len(self.output), "item": item}
        self.output.append(item)
        self._open, self._call, self._parts, self._logprobs = None, -1, [], []
        return [*events, done]

    def _enter(self, kind: str, prefix: str) -> list[Event]:
        if self._open is not None and self._open["type"] == kind:
            return []
        events = self.close()
        further: dict[str, Any] = {"role": "assistant"} if kind == "message" else {"summary": []}
        events.append(self._begin({"id": self._id(prefix), "type": kind, "content": [], **further}))
        return [*events, self._event("content_part.added", content_index=0, part=self._part(""))]

    def _enter_call(self, part: ToolCallDelta) -> list[Event]:
        if part.index == self._call:
            return []
        events = self.close()
        self._call = part.index
        call_id = part.call_id or self._id("call")
        item = {"id": self._id("fc"), "type": "function_call", "call_id": call_id, "name": part.name, "arguments": ""}
        if part.name in self._namespaces:
            item["namespace"] = self._namespaces[part.name]
        return [*events, self._begin(item)]

    def _begin(self, item: dict[str, Any]) -> Event:
        item["status"] = "in_progress"
        self._open = item
        return {"type": "response.output_item.added", "output_index": len(self.output), "item": dict(item)}

    def _part(self, text: str) -> dict[str, Any]:
        if self._open is not None and self._open["type"] == "message":
            return {"type": "output_text", "text": text, "annotations": [], "logprobs": self._logprobs}
        return {"type": "reasoning_text", "text": text}

    def _event(self, kind: str, **further: Any) -> Event:
        item_id = self._open["id"] if self._open is not None else ""
        return {"type": f"response.{kind}", "item_id": item_id, "output_index": len(self.output), **further}

    def _id(self, prefix: str) -> str:
        return f"{prefix}_{self._request_id}_{len(self.output)}"
