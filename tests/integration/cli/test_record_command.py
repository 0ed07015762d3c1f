"""A run on a real cluster with scripted engines is recorded by the command, and its file says what the run did."""

import asyncio
import os
import sys
from collections import Counter
from pathlib import Path

import pytest
from msgspec.structs import replace

from ebbtide.errors import NotFound, NotReady
from ebbtide.lab_commands.simulation import fetch_recording
from ebbtide.simulator.recording.recorded_run import read_record
from ebbtide.simulator.recording.recorded_scenario import known_turns
from ebbtide.types.tokens import unpack_ids
from tests.chaos.cluster import SCRIPT, TOKEN, Cluster
from tests.chaos.load import RUN, SPEC, Load, make_requests

pytestmark = pytest.mark.timeout(120)
STEPS, GROUPS, SIZE = 2, 6, 4
_STEP_S = 0.012


async def ebbtide(cluster: Cluster, *words: str) -> tuple[int | None, str, str]:
    """Exit status, output and errors of a command."""
    where = {"EBBTIDE_COORDINATOR": cluster.process["coordinator"].address, "EBBTIDE_TOKEN": TOKEN}
    where["EBBTIDE_RELAY"] = cluster.process["relay"].address
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "ebbtide.cli", *words, env={**os.environ, **where},
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, err = await process.communicate()
    return process.returncode, out.decode(), err.decode()


async def train(load: Load, cluster: Cluster) -> None:
    """Two steps, of which the second loses worker w1, which another one follows; then the third step's version."""
    for step in range(STEPS):
        await load.publish(step=step)
        made = make_requests(step * GROUPS * SIZE, GROUPS * SIZE)
        load.requests |= {request.rollout_id: request for request in made}
        await load.lease.submit_rollouts(made, step=step, first_step=step)
        if step == 1:
            await load.more_tokens(200)
            cluster.kill("w1")
            await cluster.worker("w3", kind="spot")
        await load.all_finished()
    await load.publish(step=STEPS)


async def test_lengths_groups_workers_and_steps_of_the_file_are_those_of_the_run(
    cluster: Cluster, tmp_path: Path
) -> None:
    cluster.script = replace(SCRIPT, step_s=_STEP_S)
    client = await cluster.boot(workers=2)
    batch = {"groups_per_step": GROUPS, "group_size": SIZE}
    await client.submit({**SPEC, "batch": batch, "trainer": {"name": "external", "steps": 9}}, RUN)
    load = await Load.claim(cluster, client)
    with pytest.raises(NotReady, match="no step of it is over"):
        await fetch_recording(client, RUN)
    with pytest.raises(NotFound):
        await fetch_recording(client, "none")

    await train(load, cluster)
    file = tmp_path / "run.json"
    status, out, err = await ebbtide(cluster, "run", "record", RUN, str(file))
    assert status == 0, err
    assert out == f"{file}: {len(load.requests)} rollouts of {STEPS} steps, on 3 workers\n"

    recorded = read_record(file)
    rows, names = recorded.rollouts, list(load.requests)
    assert Counter(rows.length) == Counter(map(load.length, names))
    assert rows.step == [0] * GROUPS * SIZE + [1] * GROUPS * SIZE
    assert Counter(zip(rows.step, rows.prompt, rows.length, strict=True)) == Counter(
        (number // (GROUPS * SIZE), len(unpack_ids(load.requests[name].prompt_ids)), load.length(name))
        for number, name in enumerate(names)
    )
    groups = [{load.length(name) for name in names[at : at + SIZE]} for at in range(0, len(names), SIZE)]
    found: dict[int, set[int]] = {}
    for group, length in zip(rows.group, rows.length, strict=True):
        found.setdefault(group, set()).add(length)
    assert sorted(map(sorted, found.values())) == sorted(map(sorted, groups))
    assert sum(rows.attempts) == len(cluster.ledger())
    assert [len(groups) for groups in known_turns(recorded).steps] == [GROUPS] * STEPS

    w1, w2, w3 = recorded.workers
    assert [worker.worker for worker in recorded.workers] == ["w1", "w2", "w3"]
    assert (w1.lost, w2.lost, w3.lost, w3.kind, w3.slots) == (1, 0, 0, "spot", 32)
    assert w1.present[-1][1] is not None
    assert (w2.present[-1][1], w3.present[-1][1]) == (None, None)
    assert 0 < w3.present[0][0] <= recorded.until_s
    made = sum(worker.tokens for worker in recorded.workers)
    assert made == sum(map(load.length, names))
    assert recorded.engine is not None
    paces = [recorded.engine.base_s + recorded.engine.rollout_s * running for running in (1, 12)]
    assert all(_STEP_S * 0.8 < pace < _STEP_S * 8 for pace in paces)  # flushes take their time, on a busy machine more
    assert [step.step for step in recorded.steps] == [0, 1]
    assert all(step.opened_s < step.generated_s <= step.announced_s for step in recorded.steps)
    assert recorded.weights.dense == 16 * 4  # the relay says what this trainer does not report
    assert recorded.weights.sent > 0
    assert {one.worker for one in recorded.installs} == {"w1", "w2", "w3"}
    await load.close()
