"""What a coordinator's decisions were handed is recorded, and a replay elsewhere takes the very same decisions."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.control_plane.driver import Driver
from tests.integration.coordinator.conftest import TOKEN
from tests.integration.coordinator.recorded_crew import PLACED, Crew, befall


def replay(path: Path) -> dict[str, Any]:
    """In a process of its own, whose sets have another order."""
    command = [sys.executable, "-m", "ebbtide.simulator.decision_replay", str(path)]
    done = subprocess.run(command, capture_output=True, check=False, env={**os.environ, "PYTHONHASHSEED": "7"})
    assert done.stdout, done.stderr.decode()
    found: dict[str, Any] = json.loads(done.stdout)
    assert done.returncode == (found["first_difference"] is not None)
    return found


async def test_every_placement_of_a_live_run_with_two_kills_and_a_drain_is_taken_again(
    cluster_with: Any, tmp_path: Path
) -> None:
    path = tmp_path / "decisions"
    async with cluster_with(record_decisions=str(path), heartbeat_timeout_s=1.0, heartbeat_s=0.2) as cluster:
        address = cluster.server.address
        drivers = [Driver(address, TOKEN, run_id=name, lengths=(2, 24)) for name in ("one", "two")]
        crew = Crew(address, TOKEN)
        for driver in drivers:
            await driver.start()
            driver.want(160)

        async def drain() -> None:
            cluster.coordinator.fleet.drain("w3", 5.0)

        await befall(crew, drain)
        await crew.close()
        for driver in drivers:
            driver.check()
            assert not driver.lost_tokens
            await driver.close()
    found = await asyncio.to_thread(replay, path)
    assert found["first_difference"] is None
    assert found["placements"] == found["placements_equal"] >= PLACED
    assert found["decisions"] == found["decisions_equal"] > 0
    assert found["placements_added"] == found["decisions_added"] == 0
