"""Watches how late the coordinator is, and tells what gives way meanwhile."""

import asyncio
from typing import Final

from ebbtide import telemetry
from ebbtide.coordinator import metrics
from ebbtide.coordinator.rules.overload import TICK_S, Overload, Work
from ebbtide.coordinator.state.coordinator_state import CoordinatorState

log = telemetry.get_logger(__name__)
#: The lag's gauge shows the largest of so many ticks: a second.
_SHOWN: Final = round(1 / TICK_S)


async def watch_lag(state: CoordinatorState) -> None:
    """Note each turn of the loop, for ever."""
    overload, told, largest, ticks = state.overload, 0, 0.0, 0
    _show(overload)  # each kind has its gauge before any gives way
    while True:
        overload.ticked(now := state.clock())
        largest, ticks = max(largest, overload.lag_s), ticks + 1
        if ticks == _SHOWN:
            metrics.loop_lag.set(largest)
            metrics.heartbeat_delay.set(overload.delay_s)
            largest, ticks = 0.0, 0
        if overload.level != told:
            state.shed(overload.level)
            _show(overload)
            _tell(overload, now, more=overload.level > told)
            told = overload.level
        await asyncio.sleep(TICK_S)


def _show(overload: Overload) -> None:
    for work in Work:
        metrics.shedding.labels(work.name.lower()).set(work <= overload.level)


def _tell(overload: Overload, now: float, *, more: bool) -> None:
    # Starts alone give way now and then in a busy fleet: no reason for a line.
    if more and overload.level > Work.STARTS:
        what = ", ".join(work.name.lower() for work in overload.shed)
        late = {"lag_s": round(overload.lag_s, 3), "delay_s": round(overload.delay_s, 2)}
        log.warning("shedding", what=what, **late, since_s=round(now - overload.since, 1))
    elif not overload.level:
        log.info("shedding nothing", after_s=round(now - overload.since, 1))
