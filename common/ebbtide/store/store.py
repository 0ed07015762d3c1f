"""The store as a coordinator uses it: one connection, one term, and a wrapper per topic."""

from typing import Final

from msgspec import Struct

from ebbtide.errors import StoreUnavailable
from ebbtide.store.appends import Appends
from ebbtide.store.connection import Connection
from ebbtide.store.events import Events
from ebbtide.store.leases import Leases
from ebbtide.store.rollouts import Rollouts
from ebbtide.store.runs import Runs
from ebbtide.store.spans import Spans
from ebbtide.store.trajectories import Trajectories

#: The first whose XRANGE takes the exclusive bounds by which the scripts read on behind a cursor.
OLDEST_REDIS: Final = (6, 2)


class Condition(Struct, frozen=True):
    """What the store promises. `fsync`: "always", "everysec", "no", or "off" without an append-only file."""

    version: str
    fsync: str
    evicts: bool


class Store:
    """Open it once per coordinator. `term` is this coordinator's fence."""

    def __init__(self, link: Connection, term: str) -> None:
        self.link = link
        self.term = term
        self.runs = Runs(link, term)
        self.leases = Leases(link, term)
        self.rollouts = Rollouts(link, term)
        self.appends = Appends(link, term)
        self.trajectories = Trajectories(link, term)
        self.events = Events(link, term)
        self.spans = Spans(link, term)

    async def condition(self) -> Condition:
        """Ask the store what it is. Raises `StoreUnavailable` for one that is too old."""
        server = _info(await self.link.call("INFO", "server"))
        version = server["redis_version"]
        if tuple(int(part) for part in version.split(".")[:2]) < OLDEST_REDIS:
            wanted = ".".join(map(str, OLDEST_REDIS))
            raise StoreUnavailable(f"the store at {self.link.where} is Redis {version}; {wanted} or newer is needed")
        settings = await self._settings("appendonly", "appendfsync", "maxmemory", "maxmemory-policy")
        on = settings.get("appendonly") == "yes"
        return Condition(
            version=version,
            fsync=settings.get("appendfsync", "off") if on else "off",
            evicts=settings.get("maxmemory", "0") != "0" and settings.get("maxmemory-policy") != "noeviction",
        )

    async def _settings(self, *names: str) -> dict[str, str]:
        found: dict[str, str] = {}
        for name in names:
            found.update(_pairs(await self.link.call("CONFIG", "GET", name)))
        return found


def _pairs(flat: list[bytes]) -> dict[str, str]:
    return {key.decode(): value.decode() for key, value in zip(flat[::2], flat[1::2], strict=True)}


def _info(text: bytes) -> dict[str, str]:
    lines = (line.partition(":") for line in text.decode().splitlines() if ":" in line)
    return {name: value for name, _, value in lines}
