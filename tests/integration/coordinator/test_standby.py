"""A second coordinator that waits, takes over when the first is gone, and what the first can still do: nothing."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
import redis.asyncio

from ebbtide.auth.security import ClientSecurity, ServerSettings
from ebbtide.client import Client
from ebbtide.coordinator.election import TTL_S
from ebbtide.coordinator.service import Coordinator
from ebbtide.coordinator.settings import CoordinatorSettings
from ebbtide.errors import StandingBy, Unavailable
from ebbtide.rpc.channel import open_channel
from ebbtide.rpc.leader_channel import LeaderChannel
from ebbtide.rpc.status_table import translated
from ebbtide.store.scripts import LEADER, SCHEMA
from ebbtide.types.rollout import RolloutRequest
from ebbtide.types.run import Sampling
from ebbtide.types.tokens import pack_ids
from ebbtide.v1 import runs_pb2, runs_pb2_grpc
from tests.fakes.links import Way
from tests.support.redis_servers import EmbeddedRedis
from tests.support.waiting import wait_until

TOKEN = "a token"
SECURITY = ClientSecurity(token=TOKEN)
SPEC = {"name": "standby", "model": "m", "environment": {"name": "none"}}


class Process:
    """One coordinator. `log`: what it has said so far."""

    def __init__(self, process: asyncio.subprocess.Process, ready: Path, log: Path) -> None:
        self.process, self.ready, self._log = process, ready, log

    @property
    def address(self) -> str:
        return str(json.loads(self.ready.read_text())["address"])

    @property
    def log(self) -> str:
        return self._log.read_text()

    async def leads(self) -> None:
        await wait_until(lambda: '"took over"' in self.log, timeout=30, what="the takeover")


Start = Callable[..., Awaitable[Process]]


@pytest.fixture
async def start(tmp_path: Path, redis_url: str) -> AsyncIterator[Start]:
    """Starts coordinators on one store; those still alive at the end are killed."""
    found: list[Process] = []

    async def starting(*flags: str, listen: str = "127.0.0.1:0", store_url: str = redis_url) -> Process:
        ready, log = tmp_path / f"ready{len(found)}", tmp_path / f"log{len(found)}"
        command = [sys.executable, "-m", "ebbtide.coordinator", "--server-listen", listen, "--store-url", store_url]
        with log.open("wb") as out:
            process = await asyncio.create_subprocess_exec(
                *command, "--ready-file", str(ready), "--lease-ttl-s", "30", *flags,
                env=os.environ | {"EBBTIDE_TOKEN": TOKEN}, stdout=asyncio.subprocess.DEVNULL, stderr=out,
            )  # fmt: skip
        found.append(Process(process, ready, log))
        await wait_until(ready.exists, timeout=60)
        return found[-1]

    yield starting
    for one in found:
        if one.process.returncode is None:
            one.process.kill()
            await one.process.wait()


@pytest.fixture
async def pair(start: Start) -> tuple[Process, Process]:
    """One that leads and one that stands by."""
    first = await start("--standby")
    await first.leads()
    second = await start("--standby")
    await wait_until(lambda: '"another coordinator leads"' in second.log, timeout=30)
    return first, second


@pytest.fixture
async def client(pair: tuple[Process, Process]) -> AsyncIterator[Client]:
    """Of both, the one that stands by named first."""
    async with Client(f"{pair[1].address},{pair[0].address}", "127.0.0.1:1", security=SECURITY, patience_s=60) as made:
        yield made


def request(number: int) -> RolloutRequest:
    return RolloutRequest(
        rollout_id=f"x{number}", group_id="g", episode_id=f"e{number}", prompt_ids=pack_ids([1, 2]),
        sampling=Sampling(max_tokens=8),
    )  # fmt: skip


async def list_runs(address: str) -> list[str]:
    async with open_channel(address, SECURITY) as channel:
        with translated("coordinator", address):
            answer = await runs_pb2_grpc.RunsStub(channel).ListRuns(runs_pb2.ListRunsRequest(), timeout=10)
    return [run.run_id for run in answer.runs]


async def test_who_stands_by_refuses_every_call_and_says_who_leads(pair: tuple[Process, Process]) -> None:
    first, second = pair
    with pytest.raises(StandingBy, match=f"the one at {first.address} leads"):
        await list_runs(second.address)
    assert await list_runs(first.address) == []


async def test_a_client_that_names_both_finds_the_one_that_leads(client: Client) -> None:
    assert (await client.submit(SPEC, "r")).run_id == "r"


@pytest.mark.parametrize("violence", [signal.SIGKILL, signal.SIGSTOP])
async def test_calls_and_streams_go_on_at_the_other_when_the_leader_dies_or_freezes(
    pair: tuple[Process, Process], client: Client, violence: signal.Signals
) -> None:
    await client.submit(SPEC, "r")
    cursors: list[str] = []

    async def watch() -> None:
        async for event in client.watch("r"):
            cursors.append(event.cursor)  # noqa: PERF401 - they are looked at while it goes on

    watching = asyncio.create_task(watch())
    async with client.claim("r", "driver", holder="d") as lease:
        await lease.submit_rollouts([request(0)])
        await wait_until(lambda: len(cursors) >= 2, timeout=30)
        pair[0].process.send_signal(violence)
        outcomes = await lease.submit_rollouts([request(number) for number in range(4)])
        assert [outcome.name for outcome in outcomes] == ["KNOWN", *["ACCEPTED"] * 3]
        await client.cancel("r")
    await asyncio.wait_for(watching, 30)  # the stream brought the run's end
    assert len(cursors) == len(set(cursors))
    assert '"took over"' in pair[1].log
    if violence is signal.SIGSTOP:
        pair[0].process.send_signal(signal.SIGCONT)
        assert await asyncio.wait_for(pair[0].process.wait(), 30) == 1
        assert "another coordinator has taken over this store" in pair[0].log


async def test_one_that_is_asked_to_end_hands_over_at_once(pair: tuple[Process, Process], client: Client) -> None:
    await client.submit(SPEC, "r")
    pair[0].process.terminate()
    await pair[1].leads()
    assert await asyncio.wait_for(pair[0].process.wait(), 30) == 0
    assert [run.run_id for run in await client.runs()] == ["r"]


async def test_one_that_starts_again_beside_the_other_stands_by(pair: tuple[Process, Process], start: Start) -> None:
    first, second = pair
    first.process.kill()
    await first.process.wait()
    await second.leads()
    again = await start("--standby", listen=first.address)
    with pytest.raises(StandingBy):
        await list_runs(again.address)
    assert second.process.returncode is None


async def test_without_standby_it_takes_over_at_once(pair: tuple[Process, Process], start: Start) -> None:
    third = await start()
    await third.leads()
    assert await asyncio.wait_for(pair[0].process.wait(), 30) == 1
    assert await list_runs(third.address) == []
    with pytest.raises(StandingBy):
        await list_runs(pair[1].address)


async def test_the_lease_is_renewed_while_what_is_in_the_store_is_read(redis_url: str) -> None:
    server = ServerSettings(listen="127.0.0.1:0", token=TOKEN)
    coordinator = Coordinator(CoordinatorSettings(server=server, store_url=redis_url, standby=True))
    left, take_over = list[int](), coordinator._recovery.take_over

    async def prolonged() -> bool:
        left.append(await coordinator.link.call("PTTL", LEADER))
        return left[-1] > min(left)

    async def slowly() -> None:
        await wait_until(prolonged)
        await take_over()

    coordinator._recovery.take_over = slowly  # type: ignore[method-assign]
    await coordinator.open("here:1")
    await coordinator.close()


async def test_one_that_cannot_read_the_store_says_so_and_leads_once_it_can(start: Start, redis_url: str) -> None:
    async with redis.asyncio.from_url(redis_url) as link:
        await link.set(SCHEMA, 99)
        waiting = await start("--standby")
        await wait_until(lambda: "has schema 99, and this coordinator knows none above" in waiting.log, timeout=30)
        assert waiting.log.count("has schema 99") == 1
        await link.delete(SCHEMA)
    await waiting.leads()


async def test_a_store_that_was_away_is_no_reason_to_take_over(
    pair: tuple[Process, Process], redis_server: EmbeddedRedis
) -> None:
    os.kill(redis_server.pid, signal.SIGSTOP)
    try:
        await asyncio.sleep(2 * TTL_S)  # the promise: however long it lasts, and the lease is over then
    finally:
        os.kill(redis_server.pid, signal.SIGCONT)
    async with asyncio.timeout(30):
        while True:
            try:
                assert await list_runs(pair[0].address) == []
                break
            except Unavailable:
                await asyncio.sleep(0.1)
    with pytest.raises(StandingBy):
        await list_runs(pair[1].address)


async def test_one_that_is_cut_off_from_the_store_is_left_by_its_clients(start: Start, redis_url: str) -> None:
    """It lives, and its connections with it: it says itself that it may not lead any more."""
    way = await Way.open(redis_url)
    first = await start("--standby", store_url=way.address)
    await first.leads()
    second = await start("--standby")
    async with Client(f"{first.address},{second.address}", "127.0.0.1:1", security=SECURITY, patience_s=60) as client:
        await client.submit(SPEC, "r")
        way.hold()
        await second.leads()
        assert [run.run_id for run in await client.runs()] == ["r"]
        await wait_until(lambda: "the lease could not be renewed in time" in first.log)
        await client.submit(SPEC, "s")
        way.release()
        assert await asyncio.wait_for(first.process.wait(), 30) == 1
        assert "another coordinator has taken over this store" in first.log
        assert {run.run_id for run in await client.runs()} == {"r", "s"}
    await way.close()


async def test_with_nobody_there_the_error_names_the_service() -> None:
    async with LeaderChannel("127.0.0.1:1,127.0.0.1:2", SECURITY) as heads:
        with (
            pytest.raises(Unavailable, match=r"coordinator at 127\.0\.0\.1:[12] cannot be reached"),
            heads.translated(),
        ):
            await runs_pb2_grpc.RunsStub(heads).ListRuns(runs_pb2.ListRunsRequest(), timeout=5)
