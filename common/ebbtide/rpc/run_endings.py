"""Telling those who keep data of runs which runs have ended, while they listen.

Invariant: who listens gets every end that is told from then on, in order. What ended before is for the server to say,
behind the beginning of the listening. Nothing outlives the process: who asks again is told anew.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from msgspec import Struct

from ebbtide.errors import InvalidRequest
from ebbtide.types.ids import check_id
from ebbtide.types.run import RunStatus

#: Runs that one question may name.
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
        """What ends from now on."""
        queue: asyncio.Queue[EndedRun] = asyncio.Queue()
        self._listeners.add(queue)
        try:
            yield queue
        finally:
            self._listeners.discard(queue)


def check_held(held: tuple[str, ...]) -> tuple[str, ...]:
    """Raises `InvalidRequest` for ids that are none, and for too many."""
    if len(held) > MAX_HELD:
        raise InvalidRequest(f"at most {MAX_HELD} runs", field="held")
    for index, run_id in enumerate(held):
        check_id(run_id, field=f"held[{index}]")
    return held
