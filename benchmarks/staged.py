"""Programs that are started together and end together."""

from abc import ABC, abstractmethod
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Self


class Staged(ABC):
    """An async context manager; what `_start` has put on `_stack` ends with it, or at once if starting fails."""

    def __init__(self) -> None:
        self._stack = AsyncExitStack()

    @abstractmethod
    async def _start(self) -> None: ...

    async def __aenter__(self) -> Self:
        try:
            await self._start()
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._stack.aclose()
