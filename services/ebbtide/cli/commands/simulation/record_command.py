"""Runs `ebbtide record`: asks the coordinator for what it knows of a run, and keeps it in a file."""

from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from ebbtide.cli.views.timeline_files import fetch_events
from ebbtide.errors import EbbtideError, InvalidRequest
from ebbtide.simulator.recording.recorded_run import RecordedRun, WeightSizes
from ebbtide.simulator.recording.recording_file import write_record
from ebbtide.simulator.recording.run_recorder import record_run
from ebbtide.simulator.report.seed_spread import quantile

if TYPE_CHECKING:
    from ebbtide.client import Client


async def fetch_recording(client: "Client", run_id: str) -> RecordedRun:
    """Records the run up to now. Raises `NotFound`, and `NotReady` while no step of it is over."""
    spans = [span async for span in client.timeline(run_id)]
    events = await fetch_events(client, run_id)
    recorded = record_run(await client.run(run_id), spans, events, await client.workers())
    return recorded if recorded.weights.dense else replace(recorded, weights=await _sizes(client, run_id))


async def _sizes(client: "Client", run_id: str) -> WeightSizes:
    """Bytes of a version as the relay has them; 0 if it cannot be asked."""
    try:
        state = await client.describe_weights(run_id)
    except EbbtideError:
        return WeightSizes()
    dense = [one.info.size for one in state.versions]
    sent = [min([patch.size for patch in one.patches if patch.size] or [one.info.size]) for one in state.versions]
    return WeightSizes(dense=round(quantile(dense, 0.5) or 0), sent=round(quantile(sent, 0.5) or 0))


def write_recording(recorded: RecordedRun, file: Path) -> str:
    """Writes the file, and returns what a person is told of it. Raises `InvalidRequest`."""
    try:
        write_record(recorded, file)
    except OSError as error:
        raise InvalidRequest(f"{str(file)!r} cannot be written ({error.strerror})", field="FILE") from None
    rollouts, steps = recorded.rollouts, len(set(recorded.rollouts.step))
    told = f"{file}: {len(rollouts.step):,} rollouts of {steps:,} steps, on {len(recorded.workers):,} workers"
    left_out = recorded.left_out
    parts = {
        "of evaluation": left_out.evaluation,
        "unfinished": left_out.unfinished,
        "of steps that are not whole": left_out.of_partial_steps,
    }
    missing = ", ".join(f"{count:,} {name}" for name, count in parts.items() if count)
    told += f"; left out: {missing}" if missing else ""
    return told if recorded.weights.dense else f"{told}; sizes of versions are unknown: name their --relay"
