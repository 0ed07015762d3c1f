"""The store is brought back from a backup that was made while the run was live: the run goes on from there to its end.

Both ways of docs/deploy/redis.md. With the disk goes what the store acknowledged since; drivers and trainers
begin again.
"""

import shutil
from pathlib import Path
from typing import Any

import pytest

from ebbtide.errors import AlreadyExists
from ebbtide.types.rollout import SubmitOutcome
from ebbtide.types.run import RunStatus
from tests.chaos.cluster import Cluster
from tests.chaos.load import Begin, Load
from tests.support.redis_servers import EmbeddedRedis
from tests.support.waiting import wait_until


async def copied_journal(server: EmbeddedRedis, backup: Path) -> EmbeddedRedis:
    """The append-only file, copied while it is written to."""
    shutil.copy(server.journal, backup / server.journal.name)
    return EmbeddedRedis(backup)


async def copied_snapshot(server: EmbeddedRedis, backup: Path) -> EmbeddedRedis:
    """BGSAVE. A server with an append-only file set would not load it, so it is turned on behind the start."""
    assert b"Background saving started" in server.command("BGSAVE")
    await wait_until(lambda: server.info("rdb_bgsave_in_progress") == "0", timeout=30, what="the snapshot")
    assert server.info("rdb_last_bgsave_status") == "ok"
    shutil.copy(server.directory / "dump.rdb", backup / "dump.rdb")
    return EmbeddedRedis(backup, options={"appendonly": "no"})


async def back(server: EmbeddedRedis) -> None:
    """Start it, and let it keep what it is told from now on."""
    server.start()
    assert server.command("CONFIG", "SET", "appendonly", "yes") == b"+OK\r\n"
    await wait_until(lambda: server.info("aof_rewrite_in_progress") == "0", timeout=30, what="its append-only file")
    assert server.info("aof_last_bgrewrite_status") == "ok"


@pytest.mark.timeout(180)
@pytest.mark.parametrize("way", [copied_journal, copied_snapshot])
async def test_a_live_run_goes_on_from_a_backup(cluster: Cluster, begin: Begin, tmp_path: Path, way: Any) -> None:
    load = await begin()
    await load.submit(128)
    await load.more_tokens(600)
    (tmp_path / "backup").mkdir()
    restored: EmbeddedRedis = await way(cluster.redis, tmp_path / "backup")
    known = (await load.run()).counters
    await load.submit(32)  # the backup knows nothing of these, nor of what comes from now on
    await load.counted("tokens_stored", known["tokens_stored"] + 600)
    await load.publish(step=1)
    acknowledged = (await load.run()).counters["tokens_stored"]
    await load.close()
    cluster.kill("coordinator", "redis")
    shutil.rmtree(cluster.redis.directory)
    cluster.redis = restored
    await back(restored)
    await cluster.coordinator()

    client = cluster.client()
    found = (await client.run("r")).counters
    assert found["submitted"] == 128
    assert found["tokens_stored"] <= known["tokens_stored"] < acknowledged
    again = await Load.claim(cluster, client, load.requests.values())
    again.forgetful = True
    try:
        outcomes = await again.lease.submit_rollouts(list(load.requests.values()))
        assert outcomes.count(SubmitOutcome.ACCEPTED) == 32
        with pytest.raises(AlreadyExists):  # its number is that of a version that the relay has and the store forgot
            await again.publish(step=2)
        await again.publish(step=2)
        run = await again.settle(timeout=90)
    finally:
        await again.close()
    assert (run.status, run.counters["submitted"]) == (RunStatus.FINISHED, 160)
