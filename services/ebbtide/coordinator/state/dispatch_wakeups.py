"""Wakes the dispatcher's loops when the model has changed.

Invariant: a change that a decision depends on calls `decide`, and an attempt that loses its worker calls `reap`. The
model does both; the loops only wait.
"""

import asyncio
from contextlib import suppress


class DispatchWakeups:
    def __init__(self) -> None:
        self._decide, self._reap = asyncio.Event(), asyncio.Event()

    def decide(self) -> None:
        """There may be something to decide."""
        self._decide.set()

    def reap(self) -> None:
        """There may be an attempt to re-queue, or an ended run to delete."""
        self._reap.set()

    async def wait_to_decide(self, longest_s: float, gather_s: float) -> None:
        """Wait for a change, and then for those that come within `gather_s`; at most `longest_s` for the first."""
        with suppress(TimeoutError):
            async with asyncio.timeout(longest_s):  # not wait_for, which may swallow a cancellation
                await self._decide.wait()
            await asyncio.sleep(gather_s)
        self._decide.clear()

    async def wait_to_reap(self, longest_s: float) -> None:
        """Wait for an attempt without a worker, or an ended run; at most `longest_s`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(longest_s):
                await self._reap.wait()
        self._reap.clear()
