"""Commands whose cluster is away, slow or of another token: what they say, how soon, and with which status they end."""

import asyncio
import os
import re
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from ebbtide.types.fleet import Worker, WorkerKind, WorkerState
from ebbtide.v1 import fleet_pb2
from ebbtide.wire import to_proto
from tests.fakes.scripted_coordinator import TOKEN, Script, ScriptedCoordinator

SPEC = """
name = "mine"
model = "m"
[environment]
name = "reasoning_gym"
"""
REMEDY = "If there is no cluster, start one with `ebbtide up`, or name another by `source runs/up/env` or --"


@pytest.fixture
async def coordinator() -> AsyncIterator[ScriptedCoordinator]:
    served = ScriptedCoordinator()
    await served.start()
    yield served
    await served.stop()


@pytest.fixture
def nobody() -> Iterator[str]:
    """An address at which connections are taken, and nothing is answered."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"127.0.0.1:{listening.getsockname()[1]}"


async def start(*words: str, token: str = TOKEN, **environment: str) -> asyncio.subprocess.Process:
    plain = {name: value for name, value in os.environ.items() if not name.startswith("EBBTIDE_")}
    with_token = {**plain, **environment, **({"EBBTIDE_TOKEN": token} if token else {})}
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "ebbtide.cli", *words, env=with_token,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip


async def ebbtide(*words: str, token: str = TOKEN, **environment: str) -> tuple[int | None, str, str]:
    """Exit status, output and errors of a command."""
    process = await start(*words, token=token, **environment)
    out, err = await process.communicate()
    return process.returncode, out.decode(), err.decode()


@pytest.mark.alone
@pytest.mark.parametrize(
    ("words", "option"),
    [
        (["run", "submit", "RUN.toml", "--no-check"], "coordinator"),
        (["run", "list"], "coordinator"),
        (["run", "watch", "r"], "coordinator"),
        (["run", "cancel", "r"], "coordinator"),
        (["worker", "list", "--watch"], "coordinator"),
        (["worker", "drain", "w"], "coordinator"),
        (["run", "weights", "r", "--watch"], "relay"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
async def test_without_a_cluster_it_says_so_within_ten_seconds_and_what_it_waits_for_meanwhile(
    words: list[str], option: str, nobody: str, tmp_path: Path
) -> None:
    (tmp_path / "RUN.toml").write_text(SPEC)
    words = [str(tmp_path / word) if word == "RUN.toml" else word for word in words]
    began = time.monotonic()
    status, out, err = await ebbtide(*words, f"--{option}", nobody)
    assert time.monotonic() - began < 10
    assert (status, out) == (1, "")
    service = "coordinator" if option == "coordinator" else "weight-relay"
    waits, told = err.splitlines()
    assert re.fullmatch(rf"ebbtide: waiting for the {service} at {nobody} since \d\d:\d\d:\d\d, 2 s", waits)
    assert told.startswith(f"ebbtide: {service} at {nobody} ")
    assert told.endswith(f"{REMEDY}{option}")


async def test_a_connection_that_is_refused_is_told_with_the_remedy(nobody: str) -> None:
    status, _, err = await ebbtide("run", "watch", "r", "--coordinator", "127.0.0.1:1")
    assert status == 1
    assert "127.0.0.1:1 cannot be reached" in err
    assert REMEDY in err


async def test_a_missing_and_a_wrong_token_end_alike(coordinator: ScriptedCoordinator) -> None:
    for token, told in (("", "token: is required: set"), ("another", "the token is missing or wrong; set")):
        for words in (["run", "list"], ["run", "watch", "r"]):
            status, out, err = await ebbtide(*words, token=token, EBBTIDE_COORDINATOR=coordinator.address)
            assert (status, out) == (2, "")
            where = "EBBTIDE_TOKEN or EBBTIDE_TOKEN_FILE; of a cluster of `ebbtide up`: `source runs/up/env`"
            assert err == f"ebbtide: {told} {where}\n"
    status, _, err = await ebbtide("health", "--address", coordinator.address, token="another")
    assert (status, err.count("\n")) == (2, 1)


async def test_a_coordinator_that_answers_late_is_waited_for_and_named(
    coordinator: ScriptedCoordinator, tmp_path: Path
) -> None:
    coordinator.script.slow_s = 3.0
    (tmp_path / "RUN.toml").write_text(SPEC)
    words = ["run", "submit", str(tmp_path / "RUN.toml"), "--no-check", "--run-id", "run"]
    status, out, err = await ebbtide(*words, EBBTIDE_COORDINATOR=coordinator.address)
    assert (status, out) == (0, "run\n")
    where = f"the coordinator at {coordinator.address}"
    assert re.fullmatch(rf"ebbtide: waiting for {where} to make it durable .* since \S+, 2 s\n", err)


class Listing(Script):
    async def ListWorkers(self, request: Any, context: Any) -> Any:
        worker = Worker(worker_id="w", kind=WorkerKind.SPOT, state=WorkerState.READY, slots=4)
        return fleet_pb2.ListWorkersResponse(workers=[to_proto(worker, fleet_pb2.Worker)])


async def test_a_watched_cluster_that_goes_away_is_waited_for_and_named(coordinator: ScriptedCoordinator) -> None:
    await coordinator.stop()
    coordinator.script = Listing()  # type: ignore[abstract]
    await coordinator.start()
    watching = await start("worker", "list", "--watch", "--every", "0.1", EBBTIDE_COORDINATOR=coordinator.address)
    assert watching.stdout is not None
    assert watching.stderr is not None
    assert b" w " in await watching.stdout.readline()
    await coordinator.stop()
    told = await watching.stderr.readuntil(b" since ")  # gRPC may say something of its own before
    assert told.decode().endswith(f"ebbtide: waiting for the coordinator at {coordinator.address} since ")
    await coordinator.start()
    await watching.stdout.readuntil(b" w waits for work")
    watching.send_signal(signal.SIGINT)
    await watching.communicate()
    assert watching.returncode == 0


async def test_a_gateway_that_answers_late_is_named(nobody: str) -> None:
    asking = await start("run", "chat", "r", "hello", "--gateway", f"http://{nobody}")
    assert asking.stderr is not None
    told = (await asking.stderr.readline()).decode()
    asking.kill()
    await asking.communicate()
    assert told.startswith(f"ebbtide: waiting for the gateway at http://{nobody} since ")
