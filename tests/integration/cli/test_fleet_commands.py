"""The commands on a fleet and on a run's past, against real services with scripted engines."""

import asyncio
import json
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from ebbtide.auth.security import ClientSecurity
from ebbtide.client import SyncClient
from tests.chaos.cluster import SCRIPT, TOKEN, Cluster
from tests.chaos.load import RUN, Load
from tests.support.waiting import wait_until

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
async def load(cluster: Cluster) -> AsyncIterator[Load]:
    """64 rollouts in the middle of their generation on two workers, so slow that a command finds them there."""
    cluster.script = replace(SCRIPT, step_s=0.08)
    made = await Load.begin(cluster, await cluster.boot(workers=2))
    await made.submit(64)
    await made.more_tokens(64 * 8)
    yield made
    await made.close()


async def ebbtide(cluster: Cluster, *words: str) -> tuple[int | None, str, str]:
    """Exit status, output and errors of a command."""
    process = await start(cluster, *words)
    out, err = await process.communicate()
    return process.returncode, out.decode(), err.decode()


async def start(cluster: Cluster, *words: str) -> asyncio.subprocess.Process:
    where = {"EBBTIDE_COORDINATOR": cluster.process["coordinator"].address, "EBBTIDE_TOKEN": TOKEN, "COLUMNS": "200"}
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "ebbtide.cli", *words, env={**os.environ, **where},
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip


async def test_a_drained_worker_hands_over_without_loss_and_the_runs_past_tells_of_it(
    cluster: Cluster, load: Load, tmp_path: Path
) -> None:
    status, out, err = await ebbtide(cluster, "worker", "drain", "w1", "--within", "20s")
    assert status == 0, err
    told = re.fullmatch(r"w1 has left after [\d.]+ s; it handed over (\d+) rollouts\n", out)
    assert told, out
    assert 8 <= int(told[1]) <= 32
    await wait_until(lambda: not cluster.process["w1"].running(), what="the end of w1")
    await load.all_finished()
    assert load.generated_twice() == 0

    status, out, err = await ebbtide(cluster, "run", "timeline", RUN, "--out", str(tmp_path / "past"))
    assert (status, len(out.splitlines())) == (0, 2), err
    events = json.loads((tmp_path / "past" / "timeline.json").read_bytes())["traceEvents"]
    pids = {one["args"]["name"]: one["pid"] for one in events if one["name"] == "process_name"}
    spans = [one for one in events if one["ph"] == "X"]
    assert set(load.requests) == {one["name"] for one in spans if one["args"]["end"] == "finished"}
    assert sum(one["args"]["tokens"] for one in spans) == sum(map(load.length, load.requests))
    cut = [one for one in spans if one["args"]["end"] != "finished"]
    assert {one["pid"] for one in cut} == {pids["w1"]}
    assert len(cut) == sum(one["ph"] == "s" for one in events) > 0
    assert {"w1 draining", "w1 left", "version 1"} <= {one["name"] for one in events if one["ph"] == "i"}
    assert (tmp_path / "past" / "timeline.png").read_bytes().startswith(b"\x89PNG")

    _, out, _ = await ebbtide(cluster, "run", "show", RUN)
    resumed = re.search(r"(\d+) resumed midway", out)
    assert resumed, out
    assert 0 < int(resumed[1]) <= len(cut)
    assert "at most 0 tokens" in out
    saved = re.search(r"saved +([\d,]+) tokens that were not generated again", out)
    assert saved, out
    assert int(saved[1].replace(",", "")) == sum(record.start for record in load.resumed())


async def test_the_fleet_is_watched_until_interrupted(cluster: Cluster, load: Load) -> None:
    busy = asyncio.create_task(load.keep_open(64))  # both workers generate for as long as it takes
    process = await start(cluster, "worker", "list", "--watch", "--every", "0.1")
    assert process.stdout is not None
    seen = [(await process.stdout.readline()).decode() for _ in range(6)]
    busy.cancel()
    process.send_signal(signal.SIGINT)
    await process.communicate()
    assert process.returncode == 0
    for name in ("w1", "w2"):
        lines = [line for line in seen if f" {name} generates; " in line]
        assert len(lines) == 3
        assert re.search(r"load [1-9]\d*/\d+/32; plateau \S+; tok/s \d+(/\d+)?; version 1; heard", lines[0])


async def test_draining_nobody_is_refused_in_one_line(cluster: Cluster, load: Load) -> None:
    status, out, err = await ebbtide(cluster, "worker", "drain", "w7")
    assert (status, out) == (1, "")
    assert err.startswith("ebbtide: no worker w7 is attached")
    assert len(err.splitlines()) == 1


async def test_a_program_without_asyncio_drains_and_reads_the_timeline(cluster: Cluster, load: Load) -> None:
    address = cluster.process["coordinator"].address

    def use() -> tuple[int, list[str]]:
        with SyncClient(address, security=ClientSecurity(token=TOKEN)) as client:
            running = client.drain_worker("w2", 20.0)
            client.drain_worker("w2", 20.0)  # a repeat changes nothing
            return running, [span.worker_id for span in client.timeline(RUN)]

    running, _ = await asyncio.to_thread(use)
    assert running > 0
    await wait_until(lambda: not cluster.process["w2"].running(), what="the end of w2")
    await load.all_finished()
    with_client = cluster.client()
    spans = [span async for span in with_client.timeline(RUN)]
    assert len(spans) == len({span.attempt_id for span in spans}) == load.interruptions() + len(load.requests)
    behind = [span async for span in with_client.timeline(RUN, cursor=spans[9].cursor)]
    assert behind == spans[10:]
