"""Notes between ranks in one process: a store that can be silent, or gone."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress

from ebbtide.errors import Unavailable
from ebbtide.trainer.ranks.rank_world import RankBoard


class SharedNotes(RankBoard):
    """A board without torch's store."""

    def __init__(self) -> None:
        self.notes: dict[str, bytes] = {}
        self.gone = False
        self.answers = asyncio.Event()  # clear: the store is frozen
        self.answers.set()
        self._news = asyncio.Condition()

    async def put(self, name: str, note: bytes) -> None:
        await self._reach()
        async with self._news:
            self.notes[name] = note
            self._news.notify_all()

    async def find(self, names: Sequence[str]) -> dict[str, bytes]:
        await self._reach()
        return {name: self.notes[name] for name in names if name in self.notes}

    async def await_one(self, name: str, timeout_s: float) -> bytes | None:
        await self._reach()
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s), self._news:
                await self._news.wait_for(lambda: name in self.notes)
        await self._reach()
        return self.notes.get(name)

    async def remove(self, name: str) -> None:
        await self._reach()
        self.notes.pop(name, None)

    async def _reach(self) -> None:
        if self.gone:
            raise Unavailable("the store where the ranks meet does not answer")
        await self.answers.wait()
