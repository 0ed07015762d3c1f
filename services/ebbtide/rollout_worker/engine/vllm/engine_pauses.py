"""Counts the reasons why a vLLM engine stands still, and puts it to sleep and wakes it by vLLM's sleep mode.

vLLM knows only whether it is paused, and waking resumes it. So this object pauses it again while there is a reason.

Invariant: the engine generates only while there is no reason to pause. While its memory is away, there is one.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final

from ebbtide.rollout_worker.engine import EngineFailed

DEAD: Final = "the engine's process died; its log says why"
#: Memory that vLLM gives back in sleep, by its names.
WEIGHTS, CACHE = "weights", "kv_cache"


class EnginePauses:
    """`llm`: vLLM's AsyncLLM."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self._reasons: set[str] = set()
        self._one = asyncio.Lock()

    async def hold(self, reason: str, stop: Callable[..., Awaitable[None]] | None = None) -> None:
        """Pause, unless something paused the engine before. `stop`: the call that does it; None: vLLM's usual one.
        Raises `EngineFailed`."""
        async with self._one:
            if not self._reasons:
                try:
                    await (stop or self._llm.pause_generation)(mode="keep", clear_cache=False)
                except Exception as error:
                    if self._llm.errored:
                        raise EngineFailed(DEAD) from error
                    raise
            self._reasons.add(reason)

    async def resume(self, reason: str) -> None:
        async with self._one:
            if self._reasons == {reason}:
                await self._llm.resume_generation()
            self._reasons.discard(reason)

    async def sleep(self, reason: str, level: int) -> None:
        """Pause, and give the device's memory back: at level 1 weights go to the host's memory, at level 2 nowhere.
        Requests keep their tokens. Raises `EngineFailed`."""
        async with self._one:
            self._reasons.add(reason)
            await _whole("it did not give its memory back", self._llm.sleep(level=level, mode="keep"))

    async def wake(self, *memory: str) -> None:
        """Take these kinds of memory again, without anything: all. The reason to sleep stays. Raises
        `EngineFailed`."""
        async with self._one:
            await _whole("it did not get its memory back", self._llm.wake_up(list(memory) or None))
            if WEIGHTS not in memory:  # vLLM generates again once nothing is away
                await self._llm.pause_generation(mode="keep", clear_cache=False)


async def _whole(failure: str, call: Awaitable[Any]) -> None:
    try:
        await call
    except Exception as error:
        raise EngineFailed(f"{failure}: {error}") from error
