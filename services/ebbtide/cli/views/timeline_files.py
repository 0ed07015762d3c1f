"""Reads a run's attempts and events, and writes its timeline as a trace and as a picture."""

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from ebbtide.cli.views.timeline import Timeline, chrome_trace, make_timeline
from ebbtide.cli.waiting import Waiting
from ebbtide.errors import InvalidRequest
from ebbtide.types.run import RunEvent

if TYPE_CHECKING:
    from ebbtide.client import Client

_NAME: Final = "timeline"
#: A live run's events do not end. Existing ones come at once, so after this much silence all were read.
_SILENCE_S: Final = 2.0


async def fetch(client: "Client", run_id: str) -> Timeline:
    """Fetches the timeline up to now. Raises `NotFound`."""
    spans = [span async for span in client.timeline(run_id)]
    return make_timeline(run_id, spans, await fetch_events(client, run_id))


async def fetch_events(client: "Client", run_id: str) -> list[RunEvent]:
    """Fetches the run's events up to now. Raises `NotFound`."""
    run = await client.run(run_id)
    events: list[RunEvent] = []
    stream = client.watch(run_id)
    try:
        with Waiting(f"further events of {run_id}") as waiting:
            while True:
                # The first event is the submission: before it, only the coordinator can be silent.
                async with asyncio.timeout(_SILENCE_S if events and not run.status.ended else None):
                    events.append(await anext(stream))
                waiting.heard()
                if not run.status.ended and events[-1].age_s > run.age_s:
                    break
    except (StopAsyncIteration, TimeoutError):
        pass
    finally:
        await stream.aclose()
    return events


def write(timeline: Timeline, directory: Path) -> list[Path]:
    """Writes `timeline.json` and `timeline.png`. Returns their paths. Raises `InvalidRequest`."""
    from ebbtide.cli.views.timeline_picture import write_timeline_picture

    trace, picture = directory / f"{_NAME}.json", directory / f"{_NAME}.png"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        trace.write_bytes(msgspec.json.encode(chrome_trace(timeline)))
        write_timeline_picture(timeline, picture)
    except OSError as error:
        raise InvalidRequest(f"{str(directory)!r} cannot be written ({error.strerror})", field="--out") from None
    return [trace, picture]
