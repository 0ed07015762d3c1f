"""Ending a worker's append stream from outside, so that it opens another one and sends again.

Invariant: a stream is cut only between two messages: what it has taken in is stored and answered first.
"""

import asyncio
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Self

from ebbtide.coordinator.state.coordinator_state import WorkerSession
from ebbtide.errors import StoreUnavailable
from ebbtide.v1 import fleet_pb2


class StreamCut:
    """Used with `with`, for the length of one stream. Costs nothing per message but a test."""

    def __init__(self) -> None:
        self._session: WorkerSession | None = None
        self._watch: asyncio.Task[None] | None = None
        self._reading: asyncio.Task[object] | None = None
        self._made = False

    def by(self, session: WorkerSession) -> None:
        """The stream turned out to be this session's: it ends when the session is to `resend`."""
        session.resend.clear()
        self._stop()
        self._session, self._watch = session, asyncio.create_task(self._wait(session))

    async def _wait(self, session: WorkerSession) -> None:
        await session.resend.wait()
        if self._reading is not None:
            self._made = True
            self._reading.cancel()

    async def next(self, messages: AsyncIterator[fleet_pb2.AppendRequest]) -> fleet_pb2.AppendRequest | None:
        """The next message; None at the end. Raises `StoreUnavailable` once the worker is to send again."""
        if self._session is not None and self._session.resend.is_set():
            raise _again()
        self._reading = reading = asyncio.current_task()
        try:
            return await anext(messages, None)
        except asyncio.CancelledError:
            if not self._made or reading is None or reading.uncancel():
                raise
            raise _again() from None
        finally:
            self._reading = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop()

    def _stop(self) -> None:
        if self._watch is not None:
            self._watch.cancel()


def _again() -> StoreUnavailable:
    return StoreUnavailable("the store came back: open the stream anew, and send again what is not durable")
