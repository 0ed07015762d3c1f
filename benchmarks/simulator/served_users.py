"""Users of a served model on the engines' core, and the guard that lends it to one borrowed worker.

The served engine and the borrowed one have the whole core between them, without turns, as two tenants of one GPU. All
other programs, the users too, are on the other core.
"""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from benchmarks.pair.traffic import Speeds
from benchmarks.simulator.bound_fleet import BoundFleet
from ebbtide.demo.coserving.coserving_client import TrafficPlan
from ebbtide.demo.coserving.coserving_records import ServedAnswer, percentile, tpots, ttfts
from ebbtide.demo.coserving.request_traffic import TrafficBursts, TrafficRequest, laps, made_up
from ebbtide.errors import EbbtideError
from ebbtide.local_cluster.launcher import ProgramProcess, tethered
from ebbtide.local_cluster.local_cluster import free_address
from ebbtide.local_cluster.serving_checkpoint import ServedNetwork, served_model
from ebbtide.local_cluster.serving_engine import serving_engine
from ebbtide.serving_guard.governor.budget_decider import LatencyTargets

#: As `probe` names it.
MODEL: Final = "served"
#: 25 M parameters, as in the coserving benchmark.
_NETWORK: Final = ServedNetwork(kv_heads=2)
#: Of keys and values: one request of the longest context that the server takes.
_KV_MIB: Final = 96
#: Small bursts: one core of a CPU reads a prompt slowly.
BURSTS: Final = TrafficBursts(size=3.0, apart_s=0.3, quiet_s=5.0, prompt=120, output=12)
_WINDOW_S: Final = 60.0
_LAPS: Final = 60
_TARGETS: Final = LatencyTargets()


class UsersRecord(Struct, frozen=True, kw_only=True):
    """What a simulation of the users needs, and what they noticed."""

    requests: list[TrafficRequest]  # of one window, which repeats
    window_s: float
    speeds: Speeds  # of the served engine alone
    ttft_s: float  # targets: multiples of the p99 alone
    tpot_s: float
    alone: list[ServedAnswer]
    beside: list[ServedAnswer] = []


class ServedUsers:
    """Made by `served_users`."""

    def __init__(self, fleet: BoundFleet, engine: ProgramProcess, grants: Path, record: UsersRecord) -> None:
        self._fleet, self._engine = fleet, engine
        self.grants, self.record = grants, record

    @asynccontextmanager
    async def guarded(self) -> AsyncIterator[str]:
        """Runs the guard while the block does. Gives the URL for users."""
        process = await self._fleet.cluster.start(
            "guard",
            "serving_guard",
            listen="127.0.0.1:0",
            upstream=f"http://{self._engine.address}",
            grant_dir=self.grants,
            model=MODEL,
            ttft_ms=1e3 * self.record.ttft_s,
            tpot_ms=1e3 * self.record.tpot_s,
        )
        self._fleet.bind(process.pid, self._fleet.other_core)
        try:
            yield f"http://{process.address}"
        finally:
            await process.stop()

    @asynccontextmanager
    async def sending(self, url: str) -> AsyncIterator[None]:
        """Sends the window again and again while the block runs. Its answers are in `record` afterwards."""
        window = laps(self.record.requests, self.record.window_s, _LAPS)
        over = asyncio.Event()
        sending = asyncio.create_task(_send(self._fleet, "beside", url, window, over))
        try:
            yield
            over.set()
            self.record = replace(self.record, beside=await sending)
        finally:
            sending.cancel()
            await asyncio.wait({sending})


@asynccontextmanager
async def served_users(fleet: BoundFleet, cache: Path, seed: int) -> AsyncIterator[ServedUsers]:
    """Boots the served engine and measures it alone. It is gone once the block is left."""
    directory = fleet.cluster.directory
    grants = directory / "grants"
    grants.mkdir(mode=0o700, exist_ok=True)
    address = free_address()
    program = serving_engine(
        served_model(cache, _NETWORK), MODEL, address, directory / "serving.log", threads=1, kv_mib=_KV_MIB
    )
    # Some processors that claim bfloat16 have no kernels for it.
    engine = ProgramProcess(
        replace(program, command=tuple("float32" if word == "bfloat16" else word for word in program.command))
    )
    try:
        await engine.wait_ready()
        fleet.bind(engine.pid, fleet.other_core)
        for pid in fleet.below(engine.pid):
            fleet.bind(pid, fleet.engine_core)
        yield ServedUsers(fleet, engine, grants, await _alone(fleet, f"http://{address}", seed))
    finally:
        await engine.stop()


async def _alone(fleet: BoundFleet, url: str, seed: int) -> UsersRecord:
    """Sends one window to the engine alone, and derives the targets from its latencies."""
    from benchmarks.pair.level import probe  # with torch, which nothing else here needs

    speeds = await probe(url)
    requests = made_up(BURSTS, _WINDOW_S, seed)
    answers = await _send(fleet, "alone", url, requests, asyncio.Event())
    if not (ttft := ttfts(answers)) or not (tpot := tpots(answers)):
        raise EbbtideError(f"no request was served: {answers[0].failed if answers else 'none was sent'}")
    return UsersRecord(
        requests=requests,
        window_s=_WINDOW_S,
        speeds=speeds,
        ttft_s=_TARGETS.ttft_factor * percentile(ttft),
        tpot_s=_TARGETS.tpot_factor * percentile(tpot),
        alone=answers,
    )


async def _send(
    fleet: BoundFleet, name: str, url: str, requests: Sequence[TrafficRequest], over: asyncio.Event
) -> list[ServedAnswer]:
    """Has a process of its own send the requests, until `over` is set. Returns the answers."""
    plan, out = (fleet.cluster.directory / f"{name}-{part}.json" for part in ("plan", "answers"))
    plan.write_bytes(msgspec.json.encode(TrafficPlan(requests=list(requests))))
    arguments = ("--url", url, "--model", MODEL, "--plan", str(plan), "--out", str(out))
    command = tethered(sys.executable, "-m", "ebbtide.demo.coserving.coserving_client", *arguments)
    client = await asyncio.create_subprocess_exec(*command)
    fleet.bind(client.pid, fleet.other_core)
    ending = asyncio.create_task(_end_when(over, client))
    try:
        if await client.wait():
            raise EbbtideError(f"the users' client ended with status {client.returncode}")
    finally:
        ending.cancel()
        if client.returncode is None:
            client.kill()
            await client.wait()
    return msgspec.json.decode(out.read_bytes(), type=list[ServedAnswer])


async def _end_when(over: asyncio.Event, client: Any) -> None:
    await over.wait()
    with suppress(ProcessLookupError):
        os.kill(client.pid, signal.SIGTERM)
