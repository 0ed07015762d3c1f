"""Gives a coordinator its store: one connection, one term, and a wrapper per topic."""

from typing import Final

from msgspec import Struct

from ebbtide.errors import StoreUnavailable
from ebbtide.store.link.dialer import info
from ebbtide.store.link.store_connection import StoreConnection
from ebbtide.store.migrations import Schema
from ebbtide.store.record_codec import text_pairs
from ebbtide.store.topics.account_topic import AccountTopic
from ebbtide.store.topics.event_topic import EventTopic
from ebbtide.store.topics.leadership_topic import LeadershipTopic
from ebbtide.store.topics.lease_topic import LeaseTopic
from ebbtide.store.topics.rollout_topic import AppendTopic, RolloutTopic
from ebbtide.store.topics.run_topic import RunTopic
from ebbtide.store.topics.session_topic import SessionTopic
from ebbtide.store.topics.span_topic import SpanTopic
from ebbtide.store.topics.trajectory_topic import TrajectoryTopic

#: The first version whose XRANGE takes exclusive bounds, with which the scripts read on after a cursor.
OLDEST_REDIS: Final = (6, 2)


class Condition(Struct, frozen=True):
    """The store's version and guarantees."""

    version: str
    fsync: str  # "always", "everysec", "no", or "off" without an append-only file
    evicts: bool
    #: The store may lose writes that were acknowledged within this time, at least: see `DurabilityPromise`.
    durable_after_s: float = 0.0
    skips_fsync: bool = False  # it does not sync while it rewrites its append-only file or saves
    promotes: bool = False  # it has replicas that do not confirm each write, and one may take its place
    wipes: bool = False  # it would restart empty, and empty its replicas


class Room(Struct, frozen=True):
    """The store's memory in bytes."""

    used: int
    limit: int  # 0: none


class Store:
    """One per coordinator, whose fence is `term`."""

    def __init__(self, link: StoreConnection, term: str) -> None:
        self.link = link
        self.term = term
        self.schema = Schema(link, term)
        untaken = set[str]()
        self.leadership = LeadershipTopic(link, term)
        self.runs = RunTopic(link, term, untaken)
        self.leases = LeaseTopic(link, term, untaken)
        self.rollouts = RolloutTopic(link, term, untaken)
        self.appends = AppendTopic(link, term, untaken)
        self.trajectories = TrajectoryTopic(link, term, untaken)
        self.events = EventTopic(link, term, untaken)
        self.spans = SpanTopic(link, term, untaken)
        self.sessions = SessionTopic(link, term, untaken)
        self.accounts = AccountTopic(link, term, untaken)

    async def check(self) -> None:
        """Check, without a change, that this program can read all stored data. Raises `StoreUnavailable`."""
        await self.schema.check()
        await self.runs.check_specs()

    async def condition(self) -> Condition:
        """Ask the store for its version and guarantees. Raises `StoreUnavailable` if it is too old."""
        said = info(await self.link.call("INFO"))
        version = said["redis_version"]
        if tuple(int(part) for part in version.split(".")[:2]) < OLDEST_REDIS:
            wanted = ".".join(map(str, OLDEST_REDIS))
            raise StoreUnavailable(f"the store at {self.link.where} is Redis {version}; {wanted} or newer is needed")
        settings = await self._settings("save", "maxmemory", "maxmemory-policy")
        look = await self.link.durability.look()
        promise = self.link.durability.horizon.promise
        return Condition(
            version=version,
            fsync=look.fsync,
            evicts=settings.get("maxmemory", "0") != "0" and settings.get("maxmemory-policy") != "noeviction",
            durable_after_s=promise.durable_after_s,
            skips_fsync=look.skips_fsync and look.fsync in {"always", "everysec"},
            promotes=self.link.durability.horizon.promotes,
            wipes=look.fsync == "off" and not settings.get("save") and said.get("connected_slaves", "0") != "0",
        )

    async def room(self) -> Room:
        said = info(await self.link.call("INFO"))
        return Room(int(said.get("used_memory", 0)), int(said.get("maxmemory", 0)))

    async def _settings(self, *names: str) -> dict[str, str]:
        found: dict[str, str] = {}
        for name in names:
            found.update(text_pairs(await self.link.call("CONFIG", "GET", name)))
        return found
