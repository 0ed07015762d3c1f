"""A trainer's site and a far one, with a slow link between them: real services, each a process of its own.

The coordinator, Redis and the trainer's relay (`relay`) are on the near side. On the far side are the workers, with
scripted engines and private mirrors, as if each were a host of its own; and, where the scene has one, a relay of that
site (`site`). All that has to do with weights crosses `link`, and nothing else does.
"""

import asyncio
from collections.abc import Iterable, Sequence
from contextlib import AsyncExitStack
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from msgspec import Struct

from benchmarks.distribution.policy import Policy
from benchmarks.staged import Staged
from ebbtide.client import Lease
from ebbtide.types.weights import PolicyVersion
from tests.chaos.cluster import Cluster
from tests.shaped_link import ShapedLink
from tests.support.waiting import wait_until

RUN: Final = "r"
_SPEC: Final = {"name": "weights", "model": "scripted", "environment": {"name": "none"}}
#: Versions kept by both relays: a worker may have missed twenty.
_KEEP: Final = 24


class Update(Struct, frozen=True):
    """One version on its way to some workers. Seconds count from its commit at the trainer's relay; `stalls` are those
    for which generation stood still; `crossed` bytes went over the slow link, of which `sent` towards the trainer."""

    version: PolicyVersion
    seconds: tuple[float, ...]
    stalls: tuple[float, ...]
    crossed: int
    sent: int


class Scene(Staged):
    """All processes die with this one."""

    def __init__(self, directory: Path, *, site_relay: bool, peers: bool = False) -> None:
        super().__init__()
        self.cluster = Cluster(directory)
        self._site_relay, self._peers = site_relay, peers
        self.link = ShapedLink("")
        self.workers: list[str] = []
        self.lease: Lease | None = None
        self.newest: PolicyVersion | None = None
        self.steps = 0  # published so far
        self._claim = AsyncExitStack()

    async def _start(self) -> None:
        self._stack.push_async_callback(self.cluster.close)
        self.cluster.store()
        keep: dict[str, Any] = {"keep_versions": _KEEP, "site": "near", "name": "origin"}
        data = self.cluster.directory
        await asyncio.gather(
            self.cluster.coordinator(),
            self.cluster.start("relay", "weight_relay", data_dir=data / "relay", server_listen="127.0.0.1:0", **keep),
        )
        self.link.target = self.cluster.process["relay"].address
        await self._stack.enter_async_context(self.link)
        if self._site_relay:
            await self.start_site_relay()
        client = self.cluster.client()
        await client.submit(_SPEC, RUN)
        self.client = client

    async def start_site_relay(self) -> None:
        """Start the far site's relay, again if need be: where it listened before."""
        listen = self.cluster.process["site"].address if "site" in self.cluster.process else "127.0.0.1:0"
        await self.cluster.start(
            "site",
            "weight_relay",
            data_dir=self.cluster.directory / "site",
            server_listen=listen,
            keep_versions=_KEEP,
            site="far",
            name="site",
            upstream=self.link.address,
        )

    async def start_workers(self, names: Iterable[str]) -> None:
        relay = self.cluster.process["site"].address if self._site_relay else self.link.address
        settings: dict[str, Any] = {"relay": relay, "site": "far", "mirror_dir": "", "pull_patience_s": 120}
        if self._peers:
            settings["peer_listen"] = "127.0.0.1:0"
        await asyncio.gather(*(self.cluster.worker(name, **settings) for name in names))
        self.workers.extend(names)

    async def claim(self) -> Lease:
        """A new lease: what it publishes first is all tiles, and what follows are patches."""
        await self._claim.aclose()
        self._claim = AsyncExitStack()
        self._stack.push_async_callback(self._claim.aclose)
        self.lease = await self._claim.enter_async_context(self.client.claim(RUN, holder="benchmark"))
        return self.lease

    async def publish(self, policy: Policy, step: int) -> PolicyVersion:
        if self.lease is None:
            raise RuntimeError("claim first")
        self.newest = await self.lease.publish(list(policy.tensors()), step=step)
        self.steps += 1
        return self.newest

    @property
    def latest(self) -> PolicyVersion:
        if self.newest is None:
            raise RuntimeError("publish first")
        return self.newest

    def passed(self) -> tuple[int, int]:
        """Bytes that the link has passed so far, from the trainer's side and towards it."""
        return self.link.received, self.link.sent

    async def settled(self) -> None:
        """All workers have the newest version."""
        await self.arrival(self.latest, self.workers, self.passed())

    async def update(self, policy: Policy, step: int, workers: Sequence[str] = (), limit_s: float = 300.0) -> Update:
        """Publish, and wait until `workers` (default: all) have installed it."""
        before = self.passed()
        version = await self.publish(policy, step)
        return await self.arrival(version, workers or self.workers, before, limit_s)

    async def arrival(
        self,
        version: PolicyVersion,
        workers: Sequence[str],
        before: tuple[int, int],
        limit_s: float = 300.0,
        since: float = 0.0,
    ) -> Update:
        """Wait until `workers` have installed `version`, timed from its commit, or from `since` by the wall clock.
        `before`: what the link had `passed` when it began."""
        entries: dict[str, dict[str, Any]] = {}

        def there() -> bool:
            for name in workers:
                if name not in entries:
                    found = [entry for entry in self.cluster.logged(name, "installed") if _is(entry, version)]
                    entries.update({name: found[-1]} if found else {})
            return len(entries) == len(workers)

        await wait_until(there, timeout=limit_s, interval=0.1, what=f"version {version.version} on {len(workers)}")
        if not since:
            (commit,) = [entry for entry in self.cluster.logged("relay", "version committed") if _is(entry, version)]
            since = _at(commit)
        seconds = tuple(sorted(_at(entry) - since for entry in entries.values()))
        stalls = tuple(float(entry["pause_s"]) for entry in entries.values())
        came, sent = (now - then for now, then in zip(self.passed(), before, strict=True))
        return Update(version, seconds, stalls, came + sent, sent)


def _is(entry: dict[str, Any], version: PolicyVersion) -> bool:
    return bool(entry["version"] == version.version)


def _at(entry: dict[str, Any]) -> float:
    return datetime.fromisoformat(entry["timestamp"]).timestamp()
