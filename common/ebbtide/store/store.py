"""Gives a coordinator its store: one connection, one term, a wrapper per topic, and a schema that it can read.

*Leading.* The term decides: one script sets it together with the lease, and from then on every write of another
coordinator is refused. The lease only says when another coordinator may take over by itself.

*Schemas.* Schema 1 is the first layout, that of a store without a stamp, too: it is empty, or forgot. Additions (a key,
a field with a default) need no number. A change of the meaning or place of stored data takes the next number, and a
step.

Invariant: the stamp is never ahead of the data. A step changes the data first; then its stamp becomes durable before
the next step or any other write. If a coordinator dies here, the next one repeats the step: every step must be safe to
repeat over changed data. All changes happen under the term. A store with a newer schema is refused before the term is
taken, so its coordinator continues.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import Final, Literal, NamedTuple

from msgspec import Struct

from ebbtide.errors import StoreUnavailable
from ebbtide.store.connection import StoreConnection, Topic
from ebbtide.store.dialer import info
from ebbtide.store.records import text_pairs
from ebbtide.store.rollouts import AppendTopic, RolloutTopic, TrajectoryTopic
from ebbtide.store.runs import EventTopic, LeaseTopic, RunTopic, SpanTopic
from ebbtide.store.scripts import FLEET, INDEX, SCHEMA, TERM, LuaScript, run_key, script
from ebbtide.store.sessions import AccountTopic, SessionTopic

#: Checks the term: a coordinator that was superseded between steps stamps nothing. Both keys lie in one slot.
_STAMP: Final = LuaScript(
    "stamp",
    "if redis.call('GET', KEYS[1]) ~= ARGV[1] then return redis.error_reply('TERM ') end\n"
    "redis.call('SET', ARGV[2], ARGV[3])\n"
    "return 1",
)
_UNSTAMPED: Final = 0
#: More digits than any schema number has.
_DIGITS: Final = 9
#: Fields that each run has.
_RECORD: Final = ("spec", "status", "created", "seq")


class MigrationStep(NamedTuple):
    """Migrates from schema `to` - 1 to `to`."""

    to: int
    what: str  # for logs
    check: Callable[[StoreConnection], Awaitable[None]] | None = None  # reads only; runs before the term is taken
    change: Callable[[StoreConnection, str], Awaitable[None]] | None = None  # with the term; safe to repeat


async def _whole_records(link: StoreConnection) -> None:
    """Raise `StoreUnavailable` if a store without a stamp holds runs that Ebbtide did not write."""
    for run_id in await _runs(link):
        found = await link.call("HMGET", run_key(run_id, "RUN"), *_RECORD)
        lacking = [name for name, value in zip(_RECORD, found, strict=True) if value is None]
        if 0 < len(lacking) < len(_RECORD):  # a run without any of them has expired
            raise StoreUnavailable(
                f"the store at {link.where} has no schema, and Ebbtide did not write run {run_id} there: its record "
                f"lacks {', '.join(lacking)}; end its runs with what wrote it, or name an empty store"
            )


#: One step for each schema, from 1 on.
STEPS: Final[Sequence[MigrationStep]] = (MigrationStep(1, "stamp a store without a schema", check=_whole_records),)


class Schema:
    """Checks and migrates one store. Call `check` before the term is taken, `migrate` after that and before any read.

    Both raise `StoreUnavailable`, `migrate` also `TermSuperseded`.
    """

    def __init__(self, link: StoreConnection, term: str, steps: Sequence[MigrationStep] = STEPS) -> None:
        self._link, self._term, self._steps = link, term, steps
        self.newest = steps[-1].to

    async def check(self) -> None:
        """Refuse a store that this program cannot read or bring up to date."""
        for step in self._steps[await self._found() :]:
            if step.check is not None:
                await step.check(self._link)

    async def migrate(self) -> list[str]:
        """Migrate the store to the newest schema. Returns the names of the steps done."""
        found = await self._found()
        for step in self._steps[found:]:
            if step.change is not None:
                await step.change(self._link, self._term)
            await self._link.run(_STAMP, TERM, self._term, SCHEMA, step.to)
            await self._link.durable()
        return [step.what for step in self._steps[found:]]

    async def _found(self) -> int:
        stamp = await self._link.call("GET", SCHEMA)
        if stamp is None:
            return _UNSTAMPED
        if not stamp.isdigit() or len(stamp) > _DIGITS:
            text = stamp[:40].decode(errors="replace")
            raise StoreUnavailable(
                f"the store at {self._link.where} has {text!r} as its schema, which is no number: name another store"
            )
        if (found := int(stamp)) > self.newest:
            raise StoreUnavailable(
                f"the store at {self._link.where} has schema {found}, and this coordinator knows none above "
                f"{self.newest}: start one of the release that wrote it, or restore a backup from before that upgrade"
            )
        return found


async def _runs(link: StoreConnection) -> list[str]:
    return [member.decode() for member in await link.call("ZRANGE", INDEX, 0, -1)]


_How = Literal["look", "seize", "wait", "renew", "release"]


class LeadershipTopic(Topic):
    async def leader(self, ttl_s: float) -> str:
        """The address of the lease's holder; an empty text if it is free. Shortens a lease of more than
        `ttl_s` to that: the store's clock was set back, and a leader that lives renews its lease in time.
        """
        return await self._lead("look", "", ttl_s)

    async def seize(self, address: str, ttl_s: float) -> None:
        """Lead from now on, even if another coordinator leads."""
        await self._lead("seize", address, ttl_s)

    async def take(self, address: str, ttl_s: float) -> str:
        """Lead from now on if the lease is free. Else returns the holder's address; on success, an empty text."""
        return await self._lead("wait", address, ttl_s)

    async def renew(self, address: str, ttl_s: float, *, patience_s: float) -> None:
        """Hold the lease for `ttl_s` from now on, also if it expired and nobody took it."""
        await self._lead("renew", address, ttl_s, patience_s=patience_s)

    async def release(self, *, patience_s: float) -> None:
        """Let another coordinator take over at once. The term stays until then."""
        await self._lead("release", "", 0.0, patience_s=patience_s)

    async def _lead(self, how: _How, address: str, ttl_s: float, *, patience_s: float | None = None) -> str:
        args = self._term, address or "-", round(ttl_s * 1000), how
        said: bytes = await self._link.run(script("lead"), FLEET, *args, patience_s=patience_s)
        return said.decode()


#: The first version whose XRANGE takes exclusive bounds, with which the scripts read on after a cursor.
OLDEST_REDIS: Final = (6, 2)


class ServerInfo(Struct, frozen=True):
    """The store's version and guarantees."""

    version: str
    fsync: str  # "always", "everysec", "no", or "off" without an append-only file
    evicts: bool
    #: The store may lose writes that were acknowledged within this time, at least: see `DurabilityPromise`.
    durable_after_s: float = 0.0
    skips_fsync: bool = False  # it does not sync while it rewrites its append-only file or saves
    promotes: bool = False  # it has replicas that do not confirm each write, and one may take its place
    wipes: bool = False  # it would restart empty, and empty its replicas


class MemoryUsage(Struct, frozen=True):
    """The store's memory in bytes."""

    used: int
    limit: int  # 0: none


class Store:
    """One per coordinator, whose fence is `term`."""

    def __init__(self, link: StoreConnection, term: str) -> None:
        self.link = link
        self.term = term
        self.schema = Schema(link, term)
        quarantined_runs = set[str]()
        self.leadership = LeadershipTopic(link, term)
        self.runs = RunTopic(link, term, quarantined_runs)
        self.leases = LeaseTopic(link, term, quarantined_runs)
        self.rollouts = RolloutTopic(link, term, quarantined_runs)
        self.appends = AppendTopic(link, term, quarantined_runs)
        self.trajectories = TrajectoryTopic(link, term, quarantined_runs)
        self.events = EventTopic(link, term, quarantined_runs)
        self.spans = SpanTopic(link, term, quarantined_runs)
        self.sessions = SessionTopic(link, term, quarantined_runs)
        self.accounts = AccountTopic(link, term, quarantined_runs)

    async def check(self) -> None:
        """Check, without a change, that this program can read all stored data. Raises `StoreUnavailable`."""
        await self.schema.check()
        await self.runs.check_specs()

    async def server_info(self) -> ServerInfo:
        """Ask the store for its version and guarantees. Raises `StoreUnavailable` if it is too old."""
        said = info(await self.link.call("INFO"))
        version = said["redis_version"]
        if tuple(int(part) for part in version.split(".")[:2]) < OLDEST_REDIS:
            wanted = ".".join(map(str, OLDEST_REDIS))
            raise StoreUnavailable(f"the store at {self.link.where} is Redis {version}; {wanted} or newer is needed")
        settings = await self._settings("save", "maxmemory", "maxmemory-policy")
        look = await self.link.durability.look()
        promise = self.link.durability.horizon.promise
        return ServerInfo(
            version=version,
            fsync=look.fsync,
            evicts=settings.get("maxmemory", "0") != "0" and settings.get("maxmemory-policy") != "noeviction",
            durable_after_s=promise.durable_after_s,
            skips_fsync=look.skips_fsync and look.fsync in {"always", "everysec"},
            promotes=self.link.durability.horizon.promotes,
            wipes=look.fsync == "off" and not settings.get("save") and said.get("connected_slaves", "0") != "0",
        )

    async def memory_usage(self) -> MemoryUsage:
        said = info(await self.link.call("INFO"))
        return MemoryUsage(int(said.get("used_memory", 0)), int(said.get("maxmemory", 0)))

    async def _settings(self, *names: str) -> dict[str, str]:
        found: dict[str, str] = {}
        for name in names:
            found.update(text_pairs(await self.link.call("CONFIG", "GET", name)))
        return found
