"""Derives which acknowledged writes survive the store's crash and its failover.

A *look* is what the store says of itself. The store answers it after every write that was acknowledged before the look
was sent. So once a look is durable, these writes are. Pure: the caller passes the looks.

Invariant: the horizon never moves back. A look becomes durable when the server has synced it, when every replica that
could be promoted has it, and not before the promise's time has passed.
"""

import math
from collections import deque
from collections.abc import Mapping
from typing import Final

from msgspec import Struct

#: By `fsync`: how long the server may still lose an acknowledged write, at least.
_FSYNC_S: Final = {"always": 0.0, "everysec": 2.0}
#: Where nothing tells when the server syncs: how long the kernel may take to write to the disk.
_UNSYNCED_S: Final = 30.0
#: Where replicas may be promoted that do not confirm each reply: how long a replica may need to show up, and how long a
#: replaced primary may take writes before the coordinator notices.
_UNCONFIRMED_S: Final = 5.0
#: A replica that is further behind, or was away for longer, is not expected to be promoted.
ABANDONED_S: Final = 30.0
#: Looks to remember. Without the oldest ones the horizon moves in larger steps.
_LOOKS: Final = 4096
#: The first version with WAITAOF.
_WAITAOF: Final = (7, 2)


class StoreLook(Struct, frozen=True, kw_only=True):
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


def seen(said: Mapping[str, str], settings: Mapping[str, str], *, sent: float, took_s: float) -> StoreLook:
    """The look in the values of `INFO` and of `CONFIG GET *append*`."""
    fsync = settings.get("appendfsync", "off") if settings.get("appendonly") == "yes" else "off"
    count = int(said.get("connected_slaves", 0))
    rows = [dict(part.partition("=")[::2] for part in said.get(f"slave{i}", "").split(",")) for i in range(count)]
    online = [row for row in rows if row.get("state") == "online"]
    version = tuple(int(part) for part in said.get("redis_version", "0").split(".")[:2])
    return StoreLook(
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
    """The looks at one incarnation of the store. `confirmed`: so many replicas have each write before its reply."""

    def __init__(self, *, sentinel: bool, confirmed: int) -> None:
        self._sentinel, self._confirmed = sentinel, confirmed
        self._looks: deque[StoreLook] = deque(maxlen=_LOOKS)  # not durable yet, oldest first
        self._idle: deque[StoreLook] = deque(maxlen=_LOOKS)  # those at which no fsync was under way
        self._replicas: dict[str, _Replica] = {}
        self._abandoned: dict[str, int] = {}  # replicas that are online and confirm nothing more -> their offset
        self._latest_ms = 0  # the latest time that the store's clock has shown
        self._proven = -math.inf
        self.promotes = False  # a replica may take the server's place that lacks acknowledged writes
        self.promise = DurabilityPromise(_UNSYNCED_S, _UNSYNCED_S)  # until the first look
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
        """Go by the looks alone: the server proves nothing any more."""
        self._proven = -math.inf

    def note(self, look: StoreLook) -> None:
        """Take in the newest look."""
        self._looks.append(look)
        if not look.waits:
            self.distrust_proofs()
        self._follow(look)
        self.promise = self._promised(look)
        self.synced = max(self.synced, self._synced(look))
        reached = min(self.synced, self._replicated(look), look.sent - self.promise.durable_after_s)
        while self._looks and self._looks[0].sent <= reached:
            durable = self._looks.popleft()
            # By the store's clock it was asked earlier than it answered, by as much as all of that took at most.
            self.before, self.before_ms = durable.sent, durable.store_ms - math.ceil(1000 * durable.took_s)

    def _follow(self, look: StoreLook) -> None:
        for address, offset in look.replicas.items():
            if offset <= self._abandoned.pop(address, -1):
                self._abandoned[address] = offset
                continue
            replica = self._replicas.setdefault(address, _Replica(self.before, look.sent))
            has = next((one.sent for one in reversed(self._looks) if one.offset <= offset), replica.caught)
            if has > replica.caught:
                replica.caught, replica.at = has, look.sent
        for address in [name for name, one in self._replicas.items() if look.sent - one.at > ABANDONED_S]:
            del self._replicas[address]
            if address in look.replicas:
                self._abandoned[address] = look.replicas[address]

    def _promised(self, look: StoreLook) -> DurabilityPromise:
        synced_s = _FSYNC_S.get(look.fsync, _UNSYNCED_S)
        if look.skips_fsync and look.fsync in _FSYNC_S:
            synced_s = _UNSYNCED_S if self._proven == -math.inf else _FSYNC_S["everysec"]
        self.promotes = (self._sentinel or look.followed) and not self._confirmed_by_all()
        return DurabilityPromise(synced_s, max(synced_s, _UNCONFIRMED_S) if self.promotes else synced_s)

    def _confirmed_by_all(self) -> bool:
        return self._confirmed > 0 and self._confirmed >= len(self._replicas)

    def _synced(self, look: StoreLook) -> float:
        promise_s = self.promise.synced_after_s
        if look.fsync == "everysec" and not look.skips_fsync and self._proven == -math.inf:
            return self._synced_every_second(look)
        self._idle.clear()
        asks = promise_s > 0 and self._proven > -math.inf
        return min(self._proven if asks else math.inf, look.sent - promise_s)

    def _synced_every_second(self, look: StoreLook) -> float:
        """The server begins an fsync each second unless one is under way. If none is under way at two looks that are
        far enough apart, one has begun after the first look, and has ended. While its clock is set back it begins none.
        """
        reached = -math.inf
        if self._idle and look.store_ms < self._idle[-1].store_ms:
            self._idle.clear()  # other clocks cannot be compared
        self._latest_ms = max(self._latest_ms, look.store_ms)
        if look.syncing or not look.writes:
            return reached
        self._idle.append(look)
        gap_s = self.promise.synced_after_s if look.store_ms == self._latest_ms else _UNSYNCED_S
        while look.sent - self._idle[0].sent >= gap_s and look.store_ms - self._idle[0].store_ms >= gap_s * 1000:
            reached = self._idle.popleft().sent
        return reached

    def _replicated(self, look: StoreLook) -> float:
        if self._confirmed_by_all():
            return look.sent
        return min((one.caught for one in self._replicas.values()), default=look.sent)
