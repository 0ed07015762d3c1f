"""Two runs whose trainers take turns end like undisturbed ones, though one trainer is killed in its turn."""

import asyncio
import os
import signal
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from ebbtide.client import Client
from ebbtide.serving_guard.turns_lender import read_turns
from ebbtide.types.run import RunSpec
from tests.integration.serving_guard.trainer_guards import TrainerGuardProcess, trainer_guard_process
from tests.integration.serving_guard.turn_trainers import check_turns
from tests.integration.trainer.conftest import Cluster, Program
from tests.integration.trainer.test_runs import check_books, ended, final_weights, trained
from tests.support.redis_servers import EmbeddedRedis
from tests.support.waiting import wait_until

MakeSpec = Callable[..., RunSpec]


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="ebb-") as made:
        path = Path(made) / "g"
        path.mkdir(0o700)
        yield path


class TwoTrainers(Cluster):
    """A cluster with a second trainer and a second driver, so that two runs are trained at a time."""

    def start(self, model: Path) -> None:
        super().start(model)
        for name in ("trainer", "driver"):
            (self.directory / "second").mkdir(exist_ok=True)
            first = self.programs[name]
            flags = ["second" if flag == name else flag for flag in first.flags if flag != str(self.metrics_port)]
            flags = [flag for flag in flags if flag != "--metrics-port"]
            self.programs[f"second {name}"] = Program(name, self.directory / "second", *flags)
        for name in ("second trainer", "second driver"):
            self.programs[name].launch()
        for name in ("second trainer", "second driver"):
            self.programs[name].wait()

    def close(self) -> None:
        for name in ("second driver", "second trainer"):
            if name in self.programs:
                self.programs[name].end()
        super().close()

    def program_of(self, pid: int) -> str:
        return next(name for name, one in self.programs.items() if one.process is not None and one.process.pid == pid)


@pytest.fixture(scope="module")
def cluster(
    tmp_path_factory: pytest.TempPathFactory, redis_server: EmbeddedRedis, tiny_model: Path, folder: Path
) -> Iterator[TwoTrainers]:
    assert redis_server.command("FLUSHALL") == b"+OK\r\n"
    directory = tmp_path_factory.mktemp("cluster")
    parked = ("--warm-dir", str(folder / "warm"), "--cold-dir", str(directory / "cold"))
    cluster = TwoTrainers(directory, redis_server.url, ("--turns", "--grant-dir", str(folder), *parked))
    try:
        cluster.start(tiny_model)
        yield cluster
    finally:
        cluster.close()


@pytest.fixture
async def guard(folder: Path) -> AsyncIterator[TrainerGuardProcess]:
    with trainer_guard_process(folder, owner="turns") as made:
        await made.ready()
        yield made


@pytest.mark.timeout(200)
async def test_two_runs_in_turns_end_like_undisturbed_ones_though_a_trainer_is_killed_in_its_turn(
    cluster: Any, client: Client, make_spec: MakeSpec, guard: TrainerGuardProcess, folder: Path
) -> None:
    spec = partial(make_spec, trainer={"kl_coefficient": 0.5, "weight_decay": 0.5})
    calm, events = await ended(client, (await client.submit(spec(), "calm")).run_id)
    check_books(calm, events)
    assert {one.run_id for one in read_turns(folder)} == {"calm"}, "a run without the key asks, too: others may wait"

    names = ("first", "second")
    for name in names:
        await client.submit(spec(sharing={"devices": "turns"}), name)
    for name in names:
        await wait_until(partial(trained, client, name, 1), timeout=60)
    held: list[int] = []

    async def in_its_turn() -> bool:
        status = await guard.status()
        newest = next((one for one in reversed(read_turns(folder)) if one.began), None)
        if status.state != "held" or newest is None or newest.turn != status.turn:
            return False
        held[:] = [seat.pid for seat in newest.seats]
        return True

    await wait_until(in_its_turn, timeout=30)
    killed = cluster.program_of(held[0])
    os.kill(held[0], signal.SIGKILL)
    await asyncio.to_thread(cluster.programs[killed].process.wait, 10)
    await asyncio.to_thread(cluster.programs[killed].start)
    for name in names:
        run, events = await ended(client, name)
        check_books(run, events)
        assert run.counters["trained"] == run.counters["submitted"] == 6 * 4 * 4
        assert all(event.values["turn_wait_s"] >= 0 for event in events if event.kind == "step")
        expected, found = final_weights(calm), final_weights(run)
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items()), name
    records = check_turns(folder)
    assert {record.run_id for record in records} == {"calm", *names}
    assert (await guard.status()).state == "free"
