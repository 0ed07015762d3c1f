"""Kills, drains and adds workers in the middle of a run's steps, at moments that the setting names."""

import asyncio
import time
from statistics import median

from benchmarks.simulator.bound_fleet import BoundFleet
from benchmarks.simulator.measured import MeasuredInterruption
from benchmarks.simulator.setting import Interruption
from ebbtide.client import Client
from ebbtide.errors import EbbtideError
from ebbtide.types.run import RunEvent


class RunWatch:
    """What a run's events have said so far. `step_opened` wakes those that wait for a step."""

    def __init__(self) -> None:
        self.events: list[RunEvent] = []
        self._changed = asyncio.Condition()
        self._opened: dict[int, float] = {}  # step -> when its version was announced, by the monotonic clock
        self._waits: list[float] = []
        self._ended = False

    async def follow(self, client: Client, run_id: str) -> None:
        """Reads events until the run has ended."""
        async for event in client.watch(run_id):
            await self.heard(event)
        self._ended = True
        await self._tell()

    async def heard(self, event: RunEvent) -> None:
        self.events.append(event)
        if event.kind == "version":
            self._opened[int(event.values["step"])] = time.monotonic()
        elif event.kind == "step":
            self._waits.append(event.values["seconds_wait"])
        await self._tell()

    async def _tell(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def opened(self, step: int) -> float:
        """Waits until the step is open. Returns when that was said, by the monotonic clock.

        Raises `EbbtideError` if the run ends before.
        """
        async with self._changed:
            await self._changed.wait_for(lambda: step in self._opened or self._ended)
        if step not in self._opened:
            raise EbbtideError(f"the run ended before its step {step}, in which a worker was to be disturbed")
        return self._opened[step]

    @property
    def usual_wait_s(self) -> float:
        """For how long the trainer waited for a step's trajectories, on median; 0 before the first step has ended."""
        return median(self._waits) if self._waits else 0.0


async def interrupt(
    fleet: BoundFleet, client: Client, watch: RunWatch, planned: tuple[Interruption, ...]
) -> list[MeasuredInterruption]:
    """Carries out all that is planned, one after another. Returns what happened when."""
    return [await _one(fleet, client, watch, one) for one in sorted(planned, key=lambda one: (one.step, one.share))]


async def _one(fleet: BoundFleet, client: Client, watch: RunWatch, planned: Interruption) -> MeasuredInterruption:
    opened = await watch.opened(planned.step)
    due = opened + planned.share * watch.usual_wait_s
    await asyncio.sleep(max(0.0, due - time.monotonic()))
    began = time.monotonic()
    if planned.kind == "join":
        worker = await fleet.thaw(client)
        return _measured(planned, worker, opened, began, back=time.monotonic())
    worker = fleet.present[0]  # the one that has been there for longest
    if planned.kind == "kill":
        fleet.kill(worker)
    else:
        await fleet.drain(client, worker)
    gone = time.monotonic()
    await asyncio.sleep(max(0.0, began + planned.back_s - time.monotonic()))
    await fleet.thaw(client)
    return _measured(planned, worker, opened, began, gone=gone, back=time.monotonic())


def _measured(
    planned: Interruption, worker: str, opened: float, began: float, *, gone: float | None = None, back: float
) -> MeasuredInterruption:
    return MeasuredInterruption(
        kind=planned.kind,
        worker=worker,
        step=planned.step,
        after_s=began - opened,
        gone_s=None if gone is None else gone - began,
        back_s=back - began,
    )
