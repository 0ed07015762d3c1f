"""Whole runs with a trainer of two ranks, each a process: they train as one, and end together whichever fails."""

import asyncio
import json
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from ebbtide.client import Client
from ebbtide.free_ports import free_port
from ebbtide.types.run import Run, RunSpec, RunStatus
from tests.integration.trainer.conftest import Cluster
from tests.integration.trainer.fixed_training import weights
from tests.integration.trainer.test_runs import check_books, ended, trained
from tests.support.redis_servers import EmbeddedRedis
from tests.support.waiting import wait_until

MakeSpec = Callable[..., RunSpec]

#: How long a rank may be silent here; the machine may be busy.
SILENT_S = 8.0
#: From a rank's end, or the notice that it is frozen, to that of all: others notice, rank 0 gives its lease back.
TOGETHER_S = 20.0


@pytest.fixture(scope="module")
def cluster(
    tmp_path_factory: pytest.TempPathFactory, redis_server: EmbeddedRedis, tiny_model: Path
) -> Iterator[Cluster]:
    assert redis_server.command("FLUSHALL") == b"+OK\r\n"
    ranks = ("--ranks", "2", "--rank-timeout-s", str(SILENT_S))
    cluster = Cluster(tmp_path_factory.mktemp("cluster"), redis_server.url, ranks)
    try:
        cluster.start(tiny_model)
        yield cluster
    finally:
        cluster.close()


def ranks_of(cluster: Cluster) -> list[psutil.Process]:
    """The processes of the ranks, by their numbers."""
    process = cluster.programs["trainer"].process
    assert process is not None
    children = psutil.Process(process.pid).children()
    return sorted(children, key=lambda child: int(child.environ()["RANK"]))


def final(run: Run) -> dict[str, torch.Tensor]:
    folder = Path(run.spec.output) / run.run_id / "checkpoints" / f"step-{run.spec.trainer.steps:06d}"
    return weights(folder)


def steady(make_spec: MakeSpec) -> RunSpec:
    """What moves its weights whatever the scripted tokens are, which depend on the prompt alone."""
    return make_spec(trainer={"kl_coefficient": 0.5, "weight_decay": 0.5})


def test_no_rank_listens_or_talks_off_the_loopback(cluster: Any) -> None:
    ranks = ranks_of(cluster)
    assert len(ranks) == 2
    for process in ranks:
        for connection in process.net_connections("tcp"):
            assert connection.laddr.ip in {"127.0.0.1", "::1", "::ffff:127.0.0.1"}, connection


@pytest.mark.timeout(300)
async def test_runs_that_fail_or_are_cancelled_leave_the_ranks_in_step_for_the_next(
    cluster: Any, client: Client, make_spec: MakeSpec
) -> None:
    before = [process.pid for process in ranks_of(cluster)]
    bad, _ = await ended(client, (await client.submit(make_spec(model="no-such-directory"))).run_id)
    assert bad.status is RunStatus.FAILED
    assert "model" in bad.message
    await client.submit(make_spec(trainer={"steps": 1000}), "long")
    await wait_until(partial(trained, client, "long", 2), timeout=60)
    assert (await client.cancel("long")).status is RunStatus.CANCELLED
    spec = make_spec(environment={"params": {"turns": 2, "vary": True}}, trainer={"steps": 3, "streaming": True})
    run, events = await ended(client, (await client.submit(spec)).run_id)
    check_books(run, events)
    assert all(event.values["grad_norm"] > 0 for event in events if event.kind == "step")
    assert [process.pid for process in ranks_of(cluster)] == before


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "harms",
    [
        pytest.param([(0, signal.SIGKILL)], id="first-killed"),
        pytest.param(
            [(1, signal.SIGSTOP), (1, signal.SIGKILL)], id="other-frozen-then-killed", marks=pytest.mark.nightly
        ),
    ],
)
async def test_a_run_whose_trainer_loses_or_freezes_any_rank_ends_like_an_undisturbed_one(
    cluster: Any, client: Client, make_spec: MakeSpec, harms: list[tuple[int, signal.Signals]]
) -> None:
    """The launcher is started again, as `ebbtide up` and systemd do; the next ranks resume from the checkpoint."""
    calm, events = await ended(client, (await client.submit(steady(make_spec), "calm")).run_id)
    check_books(calm, events)
    assert calm.counters["trained"] == calm.counters["submitted"] == 6 * 4 * 4
    expected = final(calm)
    for rank, how in harms:
        name = f"{how.name.lower()}-{rank}"
        await client.submit(steady(make_spec), name)
        await wait_until(partial(trained, client, name, 3), timeout=60)
        processes = ranks_of(cluster)
        processes[rank].send_signal(how)
        began = time.monotonic()
        status = await asyncio.to_thread(cluster.programs["trainer"].process.wait, 60)
        took = time.monotonic() - began
        assert status == 1
        assert took < TOGETHER_S + (SILENT_S if how is signal.SIGSTOP else 0.0)
        assert not [process for process in processes if process.is_running() and process.status() != "zombie"]
        log = cluster.programs["trainer"].log()
        end = "has been silent" if how is signal.SIGSTOP else "was killed by SIGKILL"
        said = f"rank {rank} of 2 {end}"
        assert said in last_reason(log)
        await asyncio.to_thread(cluster.programs["trainer"].start)
        run, events = await ended(client, name)
        check_books(run, events)
        assert run.counters["trained"] == run.counters["submitted"] == 6 * 4 * 4
        found = final(run)
        assert all(torch.allclose(found[key], tensor, rtol=1e-4, atol=1e-6) for key, tensor in expected.items())


def last_reason(log: str) -> str:
    """Why the launcher says that it failed."""
    said = [json.loads(line) for line in log.splitlines() if line.startswith("{")]
    reason: str = [one["reason"] for one in said if one.get("event") == "failed" and one.get("task") == "main"][-1]
    return reason


@pytest.mark.timeout(300)
async def test_sigterm_ends_all_ranks_cleanly_and_one_goes_on_and_then_those_of_torchrun(
    cluster: Any, client: Client, make_spec: MakeSpec
) -> None:
    await client.submit(make_spec(trainer={"steps": 12}), "handed-over")
    await wait_until(partial(trained, client, "handed-over", 3), timeout=60)
    trainer, processes = cluster.programs["trainer"], ranks_of(cluster)
    assert await asyncio.to_thread(trainer.end) == 0
    assert not [process for process in processes if process.is_running() and process.status() != "zombie"]
    flags = trainer.flags
    trainer.flags = (*flags, "--ranks", "1")
    await asyncio.to_thread(trainer.start)
    await wait_until(partial(trained, client, "handed-over", 6), timeout=60)
    assert await asyncio.to_thread(trainer.end) == 0
    trainer.flags = (*flags, "--once", "--run-id", "handed-over")
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-addr", "127.0.0.1")
    trainer.runner = (*torchrun, "--master-port", str(free_port()), "-m")
    await asyncio.to_thread(trainer.start)
    run, events = await ended(client, "handed-over")
    check_books(run, events)
    assert len([event for event in events if event.kind == "resumed"]) == 2
    assert await asyncio.to_thread(trainer.process.wait, 60) == 0
