"""Looks at the store all the time, and tells when acknowledged writes have become durable.

A server that knows WAITAOF (Redis 7.2) proves what it has synced. It blocks the connection that asks, so the question
has a connection of its own. Nothing outlives the process.
"""

import asyncio
import math
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from ebbtide.errors import EbbtideError, Internal, StoreUnavailable
from ebbtide.store.link.dialer import info
from ebbtide.store.link.durability import DurabilityHorizon, StoreLook, seen
from ebbtide.store.record_codec import text_pairs
from ebbtide.store.store_keys import SYNCED

if TYPE_CHECKING:
    from ebbtide.store.link.store_connection import StoreConnection

#: Between looks while writes wait to be durable, and while each is durable at once.
_LOOK_S: Final = 0.25
_SELDOM_S: Final = 1.0
#: At least so long between two looks: each costs store and coordinator a fifth of a millisecond.
_REST_S: Final = 0.05
#: Longest single wait for the server's fsync.
_WAITAOF_MS: Final = 1000
#: First a deletion: a full store takes these few bytes, too.
_WRITE: Final = "redis.call('DEL', KEYS[1]) redis.call('SET', KEYS[1], ARGV[1])"
#: What `lag_s` says while nothing is known.
_UNKNOWN_S: Final = 1e9


class DurabilityWatch:
    """Call `run` while the link is open, and `began` whenever it came up."""

    def __init__(self, link: "StoreConnection") -> None:
        self._link = link
        self._of = ""  # the incarnation that the horizon is of
        self.horizon = self._fresh()
        self.former_before = -math.inf  # `before` of the former incarnation at its end
        self._moved = asyncio.Event()  # replaced at each move of the horizon
        self._hurry = asyncio.Event()
        self._listeners: list[Callable[[], None]] = []
        self._prover: asyncio.Task[None] | None = None

    def _fresh(self) -> DurabilityHorizon:
        return DurabilityHorizon(sentinel=self._link.sentinel, confirmed=self._link.replicas)

    def listen(self, changed: Callable[[], None]) -> None:
        """Have `changed` called whenever the store's promise has changed."""
        self._listeners.append(changed)

    def began(self) -> None:
        """Start again if the link leads to another incarnation. It takes over the former one's promise at first."""
        if self._of != self._link.incarnation:
            promise, self.former_before = self.horizon.promise, self.before()
            self._of, self.horizon = self._link.incarnation, self._fresh()
            self.horizon.promise = promise
        self._hurry.set()
        self._wake()

    def look_soon(self) -> None:
        """Look without waiting for the next turn, as somebody waits whom it would delay."""
        self._hurry.set()

    def lag_s(self) -> float:
        """Writes acknowledged so many seconds ago are durable."""
        return 0.0 if self.horizon.at_once else min(time.monotonic() - self.horizon.before, _UNKNOWN_S)

    def before(self) -> float:
        """Writes acknowledged before this time are durable (monotonic seconds)."""
        return math.inf if self.horizon.at_once else self.horizon.before

    def before_ms(self) -> int:
        """Writes that the store stamped before this time are durable; -1 if all are."""
        return -1 if self.horizon.at_once else self.horizon.before_ms

    async def until(self, at: float, *, incarnation: str, synced: bool = False) -> float:
        """Wait until writes acknowledged at `at` are durable. Returns the time before which all are.

        `synced`: it is enough that they survive a crash of the server. Raises `StoreUnavailable` if the store has
        another incarnation meanwhile, which may have forgotten them, or is away for longer than the link's patience.
        """
        while True:
            if incarnation != self._link.incarnation:
                raise StoreUnavailable("the store came back and may know less; ask again")
            reached = self.horizon.synced if synced else self.before()
            if reached >= at:
                return reached
            if self._link.away_s > self._link.patience_s:
                raise StoreUnavailable("the store went away before the write was durable; ask again")
            with suppress(TimeoutError):
                async with asyncio.timeout(_SELDOM_S):
                    await self._moved.wait()

    async def run(self) -> None:
        """Look for ever."""
        try:
            while True:
                self._hurry.clear()
                with suppress(EbbtideError):  # the store is away, or refuses: nothing becomes durable meanwhile
                    self._keep_proving(await self.look())
                await asyncio.sleep(_REST_S)
                with suppress(TimeoutError):
                    async with asyncio.timeout(_SELDOM_S if self.horizon.at_once else _LOOK_S - _REST_S):
                        await self._hurry.wait()
        finally:
            if self._prover is not None:
                self._prover.cancel()
                await asyncio.gather(self._prover, return_exceptions=True)

    async def look(self) -> StoreLook:
        """Look once. Raises `StoreUnavailable`."""
        link, sent = self._link, time.monotonic()
        incarnation = link.incarnation
        said, settings = await asyncio.gather(
            link.call("INFO", incarnation=incarnation), link.call("CONFIG", "GET", "*append*", incarnation=incarnation)
        )
        look = seen(info(said), dict(text_pairs(settings)), sent=sent, took_s=time.monotonic() - sent)
        if incarnation != link.incarnation:
            raise StoreUnavailable("the store came back while it was looked at; ask again")
        was, reached = self.horizon.promise, (self.before(), self.horizon.synced)
        self.horizon.note(look)
        if reached != (self.before(), self.horizon.synced):
            self._wake()
        if self.horizon.promise != was:
            for changed in self._listeners:
                changed()
        return look

    def _wake(self) -> None:
        moved, self._moved = self._moved, asyncio.Event()
        moved.set()

    def _keep_proving(self, look: StoreLook) -> None:
        needed = look.waits and self.horizon.promise.synced_after_s > 0
        if needed and self._prover is None:
            self._prover = asyncio.create_task(self._prove(), name="proofs of the store's fsync")
        elif not needed and self._prover is not None:
            self._prover.cancel()
            self._prover = None

    async def _prove(self) -> None:
        """Write something, and wait until the server has synced it: then it has synced all that came before."""
        while True:
            link = self._link.another()
            try:
                await link.open()
                while True:
                    asked, incarnation, horizon = time.monotonic(), self._of, self.horizon
                    await link.call("EVAL", _WRITE, 1, SYNCED, round(asked * 1000), incarnation=incarnation)
                    synced, _ = await link.call("WAITAOF", 1, 0, _WAITAOF_MS, incarnation=incarnation)
                    if synced:
                        horizon.prove(asked)
                    await asyncio.sleep(_LOOK_S)
            except StoreUnavailable:  # away, or another incarnation by now
                await asyncio.sleep(_LOOK_S)
            except Internal:  # it does not know the command after all: the looks have to do
                self.horizon.distrust_proofs()
                return
            finally:
                await link.close()
