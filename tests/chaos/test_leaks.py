"""What runs take they give back within a second of their end: Redis' memory, workers, weights on disk and in memory."""

import asyncio
import os
import time
from collections.abc import Callable, Iterable
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any, Final

import numpy as np
import psutil
import pytest
import redis

from ebbtide.client import Client, Lease
from ebbtide.errors import EbbtideError
from ebbtide.store.keys import RUN_KEYS, run_prefix
from ebbtide.testing import wait_until
from ebbtide.types.run import RunStatus
from tests.chaos.cluster import Cluster
from tests.chaos.load import SPEC, make_requests

#: What may stay of a run until it expires.
RECORD: Final = {RUN_KEYS[name] for name in ("RUN", "COUNT", "EVENTS", "CHATTER", "EVENT_KEYS", "SPANS")}
RUNS, AT_ONCE = 50, 5
#: Three tiles, one of them small.
ELEMENTS: Final = (2 << 20) // 4 + 16
#: The promise; and what a machine that is busy with other things may make of it now and then.
PROMISED_S, BUSY_S, LATE = 1.0, 10.0, 2

pytestmark = pytest.mark.timeout(300)


class House:
    """A booted cluster whose workers share mirrors, and what is there besides its runs."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.mirrors, self.scratch = cluster.directory / "mirrors", cluster.directory / "tmp"
        self.scratch.mkdir()
        self.mirrors.mkdir(0o700)
        for name in ("coordinator", "relay", "w1", "w2"):
            cluster.environment[name] = {"TMPDIR": str(self.scratch)}
        cluster.script |= {"mirror_dir": self.mirrors, "scripted_step_s": 0.02, "scripted_mean_length": 0}

    async def boot(self, **settings: Any) -> Client:
        client = await self.cluster.boot(workers=2, **settings)
        first = await begin(client, "first")
        await served(client, "first")
        await client.cancel("first")
        await self.given_back(["first"])
        await first.release()
        self._before = self._there()
        return client

    def _there(self) -> tuple[set[Path], set[int]]:
        """Files but of Redis, and processes."""
        files = {path for path in below(self.cluster.directory) if "redis" not in path.parts[-2:]}
        return files, {child.pid for child in psutil.Process().children(recursive=True)}

    def left_in_store(self, run_ids: Iterable[str]) -> list[str]:
        """Keys of these runs that are not of their expiring records."""
        prefixes = [run_prefix(run_id) for run_id in run_ids]
        with redis.Redis(unix_socket_path=str(self.cluster.redis.socket), decode_responses=True) as store:
            keys = [key for prefix in prefixes for key in store.scan_iter(f"{prefix}*", count=10_000)]
            return [key for key in keys if key.rpartition("}:")[2] not in RECORD or store.ttl(key) <= 0]

    def left_on_disk(self) -> list[Path]:
        """What the relay and the workers' mirrors still have of any run: all of them have ended."""
        relay = self.cluster.directory / "relay"
        kept = [path for name in ("tiles", "versions", "arriving", "keys", "staging") for path in below(relay / name)]
        return kept + [path for path in below(self.mirrors) if size_of(path)]

    async def given_back(self, run_ids: list[str]) -> float:
        """Seconds until nothing was left of these runs."""
        began = time.monotonic()
        left: Callable[[], list[Any]] = lambda: [*self.left_in_store(run_ids), *self.left_on_disk()]  # noqa: E731
        with suppress(TimeoutError):
            await wait_until(lambda: not left(), BUSY_S, interval=0.05)
        assert not left()
        return time.monotonic() - began

    async def nothing_more_than_before(self, client: Client) -> None:
        files, processes = self._before
        now_files, now_processes = self._there()
        assert now_files <= files
        assert now_processes <= processes
        assert all(not worker.running for worker in await client.workers())


def below(folder: Path) -> list[Path]:
    """All that is there; what goes meanwhile is no error."""
    return [Path(where) / name for where, folders, files in os.walk(folder) for name in (*folders, *files)]


def size_of(path: Path) -> int:
    """Bytes of a file; 0 for a folder, and for what has gone."""
    with suppress(OSError):
        return path.stat().st_size if path.is_file() else 0
    return 0


async def begin(client: Client, run_id: str, *, rollouts: int = 4) -> Lease:
    """A run with a version and rollouts."""
    await client.submit(SPEC | {"trainer": {"name": "external"}}, run_id)
    lease = await client.acquire(run_id, holder=f"test-{run_id}")
    random = np.random.default_rng(abs(hash(run_id)) % (1 << 32))
    await lease.publish({"w": random.random(ELEMENTS, dtype=np.float32)}, step=0)
    await lease.submit_rollouts(make_requests(0, rollouts))
    return lease


async def served(client: Client, *run_ids: str) -> None:
    """At least one of the runs has tokens, and so a worker with its weights."""

    async def stored() -> bool:
        return any([(await client.run(run_id)).counters.get("tokens_stored", 0) for run_id in run_ids])

    await wait_until(stored, 30.0, what="tokens of any run")


async def test_fifty_cancelled_runs_leave_nothing_but_records_that_expire(cluster: Cluster) -> None:
    house = House(cluster)
    client = await house.boot(slice_s=0.3)
    took = []
    for first in range(0, RUNS, AT_ONCE):
        run_ids = [f"run-{number}" for number in range(first, first + AT_ONCE)]
        leases = await asyncio.gather(*(begin(client, run_id) for run_id in run_ids))
        await served(client, *run_ids)
        assert house.left_in_store(run_ids)
        assert house.left_on_disk()
        await asyncio.gather(*(client.cancel(run_id) for run_id in run_ids))
        took.append(await house.given_back(run_ids))
        for lease in leases:
            await lease.release()
    assert sum(one > PROMISED_S for one in took) <= LATE
    assert not house.left_in_store(["first", *(f"run-{number}" for number in range(RUNS))])
    await house.nothing_more_than_before(client)


async def test_a_finished_run_leaves_nothing_but_its_record(cluster: Cluster) -> None:
    house = House(cluster)
    client = await house.boot()
    lease = await begin(client, "run-1")
    finished = []
    async with aclosing(lease.finished()) as rollouts:
        async for rollout in rollouts:
            finished.append(rollout.rollout_id)
            if len(finished) == 4:
                break
    await lease.cancel_rollouts(finished)
    await lease.finish()
    assert (await client.run("run-1")).status is RunStatus.FINISHED
    assert await house.given_back(["run-1"]) < BUSY_S
    await lease.release()
    await house.nothing_more_than_before(client)


async def test_a_run_that_is_cancelled_while_it_publishes_and_workers_pull_leaves_nothing(cluster: Cluster) -> None:
    house = House(cluster)
    cluster.script["scripted_install_s"] = 0.3
    client = await house.boot()
    for number in range(5):
        run_id = f"run-{number}"
        lease = await begin(client, run_id)
        weights = np.random.default_rng(number).random(8 * ELEMENTS, dtype=np.float32)
        publishing = await lease.publishing({"w": weights}, step=1)
        await asyncio.sleep(0.03 * number)  # at another point of it each time
        await client.cancel(run_id)
        with suppress(EbbtideError):
            await publishing
        assert await house.given_back([run_id]) < BUSY_S
        await lease.release()
    await house.nothing_more_than_before(client)
