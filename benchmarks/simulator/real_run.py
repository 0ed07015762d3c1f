"""Runs one setting for real: the coordinator, Redis, relay, trainer and driver of the fleet, and vLLM workers."""

import asyncio
from contextlib import aclosing

from benchmarks.simulator.bound_fleet import BoundFleet
from benchmarks.simulator.interrupting import RunWatch, interrupt
from benchmarks.simulator.measured import (
    Measured,
    handed_over,
    measured_responses,
    measured_steps,
    measured_tokens,
    resumes,
)
from benchmarks.simulator.setting import RealSetting
from ebbtide.client import Client
from ebbtide.demo.foreign_load import cores, share_of_others
from ebbtide.demo.token_accounts import read_attempts
from ebbtide.errors import EbbtideError
from ebbtide.runtime import race
from ebbtide.simulator.recording.run_recorder import installs
from ebbtide.types.run import AttemptSpan, RunStatus


async def run_setting(fleet: BoundFleet, client: Client, setting: RealSetting, run_id: str, seed: int) -> Measured:
    """Runs the setting to its end on a fleet that has been arranged for it. Raises `EbbtideError` if the run fails."""
    begin, late_s = cores(), fleet.late_s
    watch = RunWatch()
    await client.submit(setting.spec(str(fleet.model), str(fleet.cluster.directory / "out"), seed), run_id)
    following = asyncio.create_task(watch.follow(client, run_id))
    interrupting = asyncio.create_task(interrupt(fleet, client, watch, setting.interruptions))
    try:
        await race(fleet.watch(), asyncio.gather(following, interrupting))
        interruptions = interrupting.result()
    finally:
        following.cancel()
        interrupting.cancel()
        await asyncio.wait({following, interrupting})
    run = await client.run(run_id)
    if run.status is not RunStatus.FINISHED:
        raise EbbtideError(f"the run of {setting.name!r} ended as {run.status.name.lower()}: {run.message}")
    spans = await _spans(client, run_id)
    ledgers = {name: fleet.ledger(name) for name in fleet.started}
    steps = measured_steps(watch.events, spans)
    killed = {one.worker for one in interruptions if one.kind == "kill"}
    return Measured(
        setting=setting,
        steps=steps,
        responses=measured_responses(spans),
        interruptions=handed_over(interruptions, steps, spans),
        installs=installs(watch.events),
        tokens=measured_tokens(read_attempts(ledgers, run_id), spans, killed),
        resumes=resumes(spans),
        load={"others": share_of_others(begin, cores()), "turns_late_s": fleet.late_s - late_s},
    )


async def _spans(client: Client, run_id: str) -> list[AttemptSpan]:
    async with aclosing(client.timeline(run_id)) as spans:
        return [span async for span in spans]
