"""Passes the ends of runs to listeners that keep data of runs.

Invariant: a listener gets every end that is told after it began to listen, in order. The server reports earlier ends
itself, after it began to listen. Nothing outlives the process: a caller that asks again gets the full answer again.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from msgspec import Struct

from ebbtide.errors import InvalidRequest
from ebbtide.types.ids import check_id
from ebbtide.types.run import RunStatus

#: Runs that one request may name.
MAX_HELD = 10_000


class EndedRun(Struct, frozen=True):
    run_id: str
    status: RunStatus


class RunsEnded(Struct, frozen=True, kw_only=True):
    """See `types.proto`."""

    ended: tuple[EndedRun, ...] = ()
    live: tuple[str, ...] = ()
    store_life: str = ""


class RunEndings:
    def __init__(self) -> None:
        self._listeners: set[asyncio.Queue[EndedRun]] = set()

    def tell(self, ended: EndedRun) -> None:
        for queue in self._listeners:
            queue.put_nowait(ended)

    @contextmanager
    def listening(self) -> Iterator[asyncio.Queue[EndedRun]]:
        """A queue of the runs that end from now on."""
        queue: asyncio.Queue[EndedRun] = asyncio.Queue()
        self._listeners.add(queue)
        try:
            yield queue
        finally:
            self._listeners.discard(queue)


def check_held(held: tuple[str, ...]) -> tuple[str, ...]:
    """Raise `InvalidRequest` for bad ids, and for too many."""
    if len(held) > MAX_HELD:
        raise InvalidRequest(f"at most {MAX_HELD} runs", field="held")
    for index, run_id in enumerate(held):
        check_id(run_id, field=f"held[{index}]")
    return held
