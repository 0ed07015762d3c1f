"""What operators see of the store: how full it is, what waits in it, and for how long it is away."""

from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY

from ebbtide.coordinator.metrics import measure
from ebbtide.v1 import types_pb2
from tests.support.redis_servers import EmbeddedRedis
from tests.support.waiting import wait_until


def value(name: str) -> float:
    found = REGISTRY.get_sample_value(f"ebbtide_coordinator_{name}")
    assert found is not None, name
    return found


@pytest.fixture
def own_redis(tmp_path: Path) -> Any:
    with EmbeddedRedis(tmp_path / "redis", options={"maxmemory": "64mb"}) as server:
        yield server


async def test_how_full_the_store_is_and_what_waits_in_it_is_measured(own_redis: Any, cluster_with: Any) -> None:
    async with cluster_with(own_redis.url) as cluster:
        run = await cluster.run(quota_bytes=1 << 20)
        worker = await cluster.worker("w1")
        await run.submit("a")
        await worker.has("a")
        await worker.add("a", 0, 60, types_pb2.FINISH_REASON_STOP)
        await run.complete("e.a", "a")
        await measure(cluster.coordinator.state, cluster.coordinator.store)
        assert (value("store_limit_bytes"), value("trajectories_waiting")) == (64 << 20, 1)
        assert 100_000 < value("store_bytes") < 64 << 20
        held = (await run.get()).counters["bytes"]
        assert 0 < held < value("quota_used") * (1 << 20) < held + 2000  # beside it are events, a span and two ids


async def test_a_store_that_is_away_is_seen_by_the_time_that_it_is(own_redis: Any, cluster_with: Any) -> None:
    async with cluster_with(own_redis.url) as cluster:
        await wait_until(lambda: value("store_away_seconds") < 0.5, what="a store that answers")
        own_redis.freeze()
        await wait_until(lambda: value("store_away_seconds") > 1.5, timeout=30, what="a frozen store")
        own_redis.thaw()
        await wait_until(lambda: value("store_away_seconds") < 0.5, timeout=30, what="a store that answers again")
        own_redis.kill()
        await wait_until(lambda: value("store_away_seconds") > 1.5, timeout=30, what="a store that is gone")
        own_redis.start()
        await wait_until(lambda: value("store_away_seconds") < 0.5, timeout=30, what="a store that came back")
        assert cluster.coordinator.link.away_s < 0.5
