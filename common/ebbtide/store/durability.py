"""Derives which acknowledged writes survive the store's crash and its failover, and samples the store all the time.

A *sample* is what the store says of itself. The store answers after every write that was acknowledged before it was
asked. So once a sample is durable, these writes are. `DurabilityHorizon` is pure: the caller passes the samples.

Invariant: the horizon never moves back. A sample becomes durable when the server has synced it, when every replica that
could be promoted has it, and not before the promise's time has passed.

A server that knows WAITAOF (Redis 7.2) proves what it has synced. It blocks the connection that asks, so the question
of `DurabilityWatch` has a connection of its own. Nothing outlives the process.
"""

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from msgspec import Struct

from ebbtide.errors import EbbtideError, Internal, StoreUnavailable
from ebbtide.store.dialer import info
from ebbtide.store.records import text_pairs
from ebbtide.store.scripts import SYNCED

if TYPE_CHECKING:
    from ebbtide.store.connection import StoreConnection


#: By `fsync`: how long the server may still lose an acknowledged write, at least.
_FSYNC_S: Final = {"always": 0.0, "everysec": 2.0}
#: Where nothing tells when the server syncs: how long the kernel may take to write to the disk.
_UNSYNCED_S: Final = 30.0
#: Where replicas may be promoted that do not confirm each reply: how long a replica may need to show up, and how long a
#: replaced primary may take writes before the coordinator notices.
_UNCONFIRMED_S: Final = 5.0
#: A replica that is further behind, or was away for longer, is not expected to be promoted.
ABANDONED_S: Final = 30.0
#: Samples to remember. Without the oldest ones the horizon moves in larger steps.
_SAMPLES: Final = 4096
#: The first version with WAITAOF.
_WAITAOF: Final = (7, 2)


class StoreSample(Struct, frozen=True, kw_only=True):
    """One answer of the store about itself."""

    sent: float  # monotonic seconds, before it was asked
    store_ms: int  # when it answered, by its own clock
    took_s: float = 0.0  # from the question to its answer
    fsync: str  # "always", "everysec", "no", or "off" without an append-only file
    skips_fsync: bool = False  # `no-appendfsync-on-rewrite`: it does not sync while a child process writes
    syncing: bool = False  # an fsync in the background has not ended
    writes: bool = True  # its last write to the append-only file succeeded
    offset: int = 0  # the end of its replication stream
    replicas: Mapping[str, int] = {}  # address of each replica that follows it -> the offset that it confirmed
    followed: bool = False  # it has, or had within the last hour, a replica
    waits: bool = False  # it knows WAITAOF


def seen(said: Mapping[str, str], settings: Mapping[str, str], *, sent: float, took_s: float) -> StoreSample:
    """The sample in the values of `INFO` and of `CONFIG GET *append*`."""
    fsync = settings.get("appendfsync", "off") if settings.get("appendonly") == "yes" else "off"
    count = int(said.get("connected_slaves", 0))
    rows = [dict(part.partition("=")[::2] for part in said.get(f"slave{i}", "").split(",")) for i in range(count)]
    online = [row for row in rows if row.get("state") == "online"]
    version = tuple(int(part) for part in said.get("redis_version", "0").split(".")[:2])
    return StoreSample(
        sent=sent,
        store_ms=int(said.get("server_time_usec", 0)) // 1000,
        took_s=took_s,
        fsync=fsync,
        skips_fsync=settings.get("no-appendfsync-on-rewrite") == "yes",
        syncing=said.get("aof_pending_bio_fsync", "0") != "0",
        writes=said.get("aof_last_write_status", "ok") == "ok",
        offset=int(said.get("master_repl_offset", 0)),
        replicas={f"{row.get('ip')}:{row.get('port')}": int(row.get("offset", 0)) for row in online},
        followed=count > 0 or said.get("repl_backlog_active", "0") != "0",
        waits=fsync in _FSYNC_S and version >= _WAITAOF,
    )


class DurabilityPromise(Struct, frozen=True):
    """How long an acknowledged write may be lost, at least (seconds); 0: it is durable at once."""

    synced_after_s: float  # by a crash of the server alone
    durable_after_s: float  # by that, or by the promotion of a replica


class _Replica(Struct):
    caught: float  # it has all writes acknowledged before this time
    at: float  # when it last confirmed more


class DurabilityHorizon:
    """The samples of one incarnation of the store. `confirmed`: so many replicas have each write before its reply."""

    def __init__(self, *, sentinel: bool, confirmed: int) -> None:
        self._sentinel, self._confirmed = sentinel, confirmed
        self._samples: deque[StoreSample] = deque(maxlen=_SAMPLES)  # not durable yet, oldest first
        self._idle: deque[StoreSample] = deque(maxlen=_SAMPLES)  # those at which no fsync was under way
        self._replicas: dict[str, _Replica] = {}
        self._abandoned: dict[str, int] = {}  # replicas that are online and confirm nothing more -> their offset
        self._latest_ms = 0  # the latest time that the store's clock has shown
        self._proven = -math.inf
        self.promotes = False  # a replica may take the server's place that lacks acknowledged writes
        self.promise = DurabilityPromise(_UNSYNCED_S, _UNSYNCED_S)  # until the first sample
        self.synced = -math.inf  # writes acknowledged before this time survive a crash of the server alone
        self.before = -math.inf  # writes acknowledged before this time are durable
        self.before_ms = 0  # the same by the store's clock, for writes that it stamped

    @property
    def at_once(self) -> bool:
        """Whether each write is durable when it is acknowledged."""
        return not self.promise.durable_after_s

    @property
    def replicas(self) -> int:
        """Replicas that could be promoted."""
        return len(self._replicas)

    def prove(self, asked: float) -> None:
        """Note that the server has synced all writes that were acknowledged before `asked`."""
        self._proven = max(self._proven, asked)

    def distrust_proofs(self) -> None:
        """Go by the samples alone: the server proves nothing any more."""
        self._proven = -math.inf

    def note(self, sample: StoreSample) -> None:
        """Take in the newest sample."""
        self._samples.append(sample)
        if not sample.waits:
            self.distrust_proofs()
        self._follow(sample)
        self.promise = self._promised(sample)
        self.synced = max(self.synced, self._synced(sample))
        reached = min(self.synced, self._replicated(sample), sample.sent - self.promise.durable_after_s)
        while self._samples and self._samples[0].sent <= reached:
            durable = self._samples.popleft()
            # By the store's clock it was asked earlier than it answered, by as much as all of that took at most.
            self.before, self.before_ms = durable.sent, durable.store_ms - math.ceil(1000 * durable.took_s)

    def _follow(self, sample: StoreSample) -> None:
        for address, offset in sample.replicas.items():
            if offset <= self._abandoned.pop(address, -1):
                self._abandoned[address] = offset
                continue
            replica = self._replicas.setdefault(address, _Replica(self.before, sample.sent))
            has = next((one.sent for one in reversed(self._samples) if one.offset <= offset), replica.caught)
            if has > replica.caught:
                replica.caught, replica.at = has, sample.sent
        for address in [name for name, one in self._replicas.items() if sample.sent - one.at > ABANDONED_S]:
            del self._replicas[address]
            if address in sample.replicas:
                self._abandoned[address] = sample.replicas[address]

    def _promised(self, sample: StoreSample) -> DurabilityPromise:
        synced_s = _FSYNC_S.get(sample.fsync, _UNSYNCED_S)
        if sample.skips_fsync and sample.fsync in _FSYNC_S:
            synced_s = _UNSYNCED_S if self._proven == -math.inf else _FSYNC_S["everysec"]
        self.promotes = (self._sentinel or sample.followed) and not self._confirmed_by_all()
        return DurabilityPromise(synced_s, max(synced_s, _UNCONFIRMED_S) if self.promotes else synced_s)

    def _confirmed_by_all(self) -> bool:
        return self._confirmed > 0 and self._confirmed >= len(self._replicas)

    def _synced(self, sample: StoreSample) -> float:
        promise_s = self.promise.synced_after_s
        if sample.fsync == "everysec" and not sample.skips_fsync and self._proven == -math.inf:
            return self._synced_every_second(sample)
        self._idle.clear()
        asks = promise_s > 0 and self._proven > -math.inf
        return min(self._proven if asks else math.inf, sample.sent - promise_s)

    def _synced_every_second(self, sample: StoreSample) -> float:
        """The server begins an fsync each second unless one is under way. If none is under way at two samples that
        are far enough apart, one has begun after the first sample, and has ended. While its clock is set back it begins
        none.
        """
        reached = -math.inf
        if self._idle and sample.store_ms < self._idle[-1].store_ms:
            self._idle.clear()  # other clocks cannot be compared
        self._latest_ms = max(self._latest_ms, sample.store_ms)
        if sample.syncing or not sample.writes:
            return reached
        self._idle.append(sample)
        gap_s = self.promise.synced_after_s if sample.store_ms == self._latest_ms else _UNSYNCED_S
        while sample.sent - self._idle[0].sent >= gap_s and sample.store_ms - self._idle[0].store_ms >= gap_s * 1000:
            reached = self._idle.popleft().sent
        return reached

    def _replicated(self, sample: StoreSample) -> float:
        if self._confirmed_by_all():
            return sample.sent
        return min((one.caught for one in self._replicas.values()), default=sample.sent)


#: Between samples while writes wait to be durable, and while each is durable at once.
_SAMPLE_S: Final = 0.25
_SELDOM_S: Final = 1.0
#: At least so long between two samples: each costs store and coordinator a fifth of a millisecond.
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
        """Take a sample without waiting for the next turn, as somebody waits whom it would delay."""
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
        """Take samples for ever."""
        try:
            while True:
                self._hurry.clear()
                with suppress(EbbtideError):  # the store is away, or refuses: nothing becomes durable meanwhile
                    self._keep_proving(await self.look())
                await asyncio.sleep(_REST_S)
                with suppress(TimeoutError):
                    async with asyncio.timeout(_SELDOM_S if self.horizon.at_once else _SAMPLE_S - _REST_S):
                        await self._hurry.wait()
        finally:
            if self._prover is not None:
                self._prover.cancel()
                await asyncio.gather(self._prover, return_exceptions=True)

    async def look(self) -> StoreSample:
        """Take a sample. Raises `StoreUnavailable`."""
        link, sent = self._link, time.monotonic()
        incarnation = link.incarnation
        said, settings = await asyncio.gather(
            link.call("INFO", incarnation=incarnation), link.call("CONFIG", "GET", "*append*", incarnation=incarnation)
        )
        sample = seen(info(said), dict(text_pairs(settings)), sent=sent, took_s=time.monotonic() - sent)
        if incarnation != link.incarnation:
            raise StoreUnavailable("the store came back while it was looked at; ask again")
        was, reached = self.horizon.promise, (self.before(), self.horizon.synced)
        self.horizon.note(sample)
        if reached != (self.before(), self.horizon.synced):
            self._wake()
        if self.horizon.promise != was:
            for changed in self._listeners:
                changed()
        return sample

    def _wake(self) -> None:
        moved, self._moved = self._moved, asyncio.Event()
        moved.set()

    def _keep_proving(self, sample: StoreSample) -> None:
        needed = sample.waits and self.horizon.promise.synced_after_s > 0
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
                    await asyncio.sleep(_SAMPLE_S)
            except StoreUnavailable:  # away, or another incarnation by now
                await asyncio.sleep(_SAMPLE_S)
            except Internal:  # it does not know the command after all: the samples have to do
                self.horizon.distrust_proofs()
                return
            finally:
                await link.close()
