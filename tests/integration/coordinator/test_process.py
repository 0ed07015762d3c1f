"""The coordinator as a process of its own."""

import asyncio
import json
import os
import signal
import sys
from typing import Any

import pytest

from ebbtide.auth.security import ClientSecurity
from ebbtide.rpc.channel import open_channel
from ebbtide.types.run import EnvironmentSpec, RunSpec
from ebbtide.v1 import runs_pb2, runs_pb2_grpc, types_pb2
from ebbtide.wire import to_proto
from tests.support.waiting import wait_until

TOKEN = "a token"


@pytest.fixture
async def start(tmp_path: Any) -> Any:
    """Starts coordinators; those still alive at the end are killed."""
    processes: list[Any] = []

    async def starting(*flags: Any, store_url: Any, ready: Any = True) -> Any:
        ready_file = tmp_path / f"ready{len(processes)}"
        command = [sys.executable, "-m", "ebbtide.coordinator", "--server-listen", "127.0.0.1:0", *flags]
        process: Any = await asyncio.create_subprocess_exec(
            *command, "--store-url", store_url, "--ready-file", str(ready_file),
            env=os.environ | {"EBBTIDE_TOKEN": TOKEN}, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        processes.append(process)
        if ready:
            await wait_until(ready_file.exists, timeout=30)
            process.address = json.loads(ready_file.read_text())["address"]
        return process

    yield starting
    for process in processes:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def test_it_says_when_it_is_ready_and_ends_cleanly_when_asked(start: Any, redis_url: Any) -> None:
    process = await start(store_url=redis_url)
    async with open_channel(process.address, ClientSecurity(token=TOKEN)) as channel:
        assert not (await runs_pb2_grpc.RunsStub(channel).ListRuns(runs_pb2.ListRunsRequest())).runs
    process.send_signal(signal.SIGTERM)
    out, _ = await process.communicate()
    assert process.returncode == 0
    assert out.decode().startswith(f"READY coordinator {process.address}")


async def test_a_coordinator_that_was_superseded_ends_within_seconds_and_says_why(start: Any, redis_url: Any) -> None:
    first = await start(store_url=redis_url)
    first.send_signal(signal.SIGSTOP)
    second = await start(store_url=redis_url)
    first.send_signal(signal.SIGCONT)  # idle: no call tells it
    _, err = await asyncio.wait_for(first.communicate(), 20)
    assert first.returncode == 1
    assert b"another coordinator has taken over this store" in err
    assert second.returncode is None


async def test_without_a_store_it_ends_with_the_remedy(start: Any, tmp_path: Any) -> None:
    process = await start("--store-boot-s", "0.3", store_url=f"unix://{tmp_path}/none.sock", ready=False)
    _, err = await asyncio.wait_for(process.communicate(), 20)
    assert process.returncode == 1
    assert b"none.sock does not answer" in err
    assert b"start it, or correct the store URL" in err


async def test_a_start_that_cannot_listen_leaves_the_serving_coordinator_alone(start: Any, redis_url: Any) -> None:
    serving = await start(store_url=redis_url)
    second = await start("--server-listen", serving.address, store_url=redis_url, ready=False)
    _, err = await asyncio.wait_for(second.communicate(), 20)
    assert second.returncode == 1
    assert f"listen: cannot bind {serving.address}".encode() in err
    async with open_channel(serving.address, ClientSecurity(token=TOKEN)) as channel:
        spec = to_proto(RunSpec(name="n", model="m", environment=EnvironmentSpec(name="e")), types_pb2.RunSpec)
        await runs_pb2_grpc.RunsStub(channel).SubmitRun(runs_pb2.SubmitRunRequest(run_id="r", spec=spec))


async def test_asked_to_end_while_it_waits_for_the_store_it_ends(start: Any, tmp_path: Any) -> None:
    process = await start(store_url=f"unix://{tmp_path}/none.sock", ready=False)
    assert b"waiting for the store" in await asyncio.wait_for(process.stderr.readline(), 20)
    process.send_signal(signal.SIGTERM)
    await asyncio.wait_for(process.communicate(), 10)
    assert process.returncode == 0


async def test_a_store_url_that_names_no_store_is_refused_by_field(start: Any) -> None:
    process = await start(store_url="nonsense", ready=False)
    _, err = await asyncio.wait_for(process.communicate(), 20)
    assert b"store_url: 'nonsense' cannot be used" in err
    assert b"Traceback" not in err


async def test_help_answers_without_loading_what_it_does_not_need() -> None:
    command = [sys.executable, "-X", "importtime", "-m", "ebbtide.coordinator", "--help"]
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, imported = await process.communicate()
    assert process.returncode == 0
    assert b"--store-url" in out
    assert b" redis" not in imported
    assert b" vllm" not in imported
