"""Calls an ASGI application as a server would, with a client that can leave, or send its body in pieces."""

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec


class AsgiCall:
    """One POST request under way."""

    def __init__(
        self, app: Any, path: str, body: Any, headers: dict[str, str], *, pieces: Sequence[bytes] | None = None
    ) -> None:
        """`pieces`: the body as it arrives, instead of `body`; without a last one, it never ends."""
        data = msgspec.json.encode(body)
        self._messages = [{"type": "http.request", "body": one, "more_body": True} for one in pieces or ()]
        if pieces is None:
            self._messages = [{"type": "http.request", "body": data, "more_body": False}]
        self._gone = asyncio.Event()
        self.sent: list[dict[str, Any]] = []
        self.news = asyncio.Condition()
        scope = {
            "type": "http",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": b"",
            "headers": [(name.lower().encode(), value.encode()) for name, value in headers.items()],
        }
        self.task = asyncio.create_task(app(scope, self._receive, self._send))

    def leave(self) -> None:
        self._gone.set()

    @property
    def status(self) -> int:
        return int(self.sent[0]["status"])

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)

    async def until(self, part: bytes) -> None:
        """Wait until the answer holds `part`."""
        async with asyncio.timeout(30), self.news:
            await self.news.wait_for(lambda: part in self.body)

    async def _receive(self) -> dict[str, Any]:
        if self._messages:
            return self._messages.pop(0)
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        async with self.news:
            self.sent.append(message)
            self.news.notify_all()
