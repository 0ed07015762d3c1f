"""Puts decisions into practice: runs the rounds, does in the store what they yield, and keeps the workers judged.

Four loops run. `decide` acts on changes; `reap` re-queues orphans and deletes ended runs; both retry while the store
is away. `watch` judges the workers, and waits only for the clock. `lag` sees how late
the event loop is, and what gives way meanwhile.
"""

import asyncio
import math
from functools import partial
from typing import Final

from ebbtide import telemetry
from ebbtide.coordinator import metrics
from ebbtide.coordinator.attempt_transitions import AttemptTransitions, changing
from ebbtide.coordinator.dispatch.dispatch_round import TICK_S, Action, DispatchRound, SlotFill, gather_s
from ebbtide.coordinator.dispatch.unserved_work import DeadLetters, RunFailure
from ebbtide.coordinator.fleet.worker_registry import WorkerRegistry
from ebbtide.coordinator.rules.overload import TICK_S as LAG_TICK_S
from ebbtide.coordinator.rules.overload import Overload, Work
from ebbtide.coordinator.run_recovery import RunRecovery
from ebbtide.coordinator.state.coordinator_state import CoordinatorState
from ebbtide.coordinator.state.run_state import RunState
from ebbtide.errors import StoreUnavailable
from ebbtide.types.rollout import DropReason
from ebbtide.types.run import RunStatus

log = telemetry.get_logger(__name__)
_STORE_PAUSE_S: Final = 0.2
#: A round waits so long for stale mirrors to be read.
_READ_S: Final = 0.05
#: How often the gauges are set; scrapes are no more frequent.
_OBSERVE_EVERY_S: Final = 1.0


class Dispatcher:
    def __init__(
        self,
        state: CoordinatorState,
        fleet: WorkerRegistry,
        attempts: AttemptTransitions,
        recovery: RunRecovery,
        rounds: DispatchRound,
    ) -> None:
        self._state, self._fleet, self._attempts, self._recovery = state, fleet, attempts, recovery
        self._rounds = rounds
        self._readings: dict[RunState, asyncio.Task[None]] = {}

    async def decide_for_ever(self) -> None:
        while True:
            pause_s = self._rounds.pause_s(self._state.clock())
            gather = gather_s(len(self._state.sessions)) if pause_s else 0.0
            await self._state.wakeups.wait_to_decide(pause_s, gather)
            try:
                await self.decide()
            except StoreUnavailable as error:
                log.warning("store away", reason=str(error))
                self._state.wakeups.decide()
                await asyncio.sleep(_STORE_PAUSE_S)

    async def watch_for_ever(self) -> None:
        """Judge the workers on time: a late judge finds lost workers late, or takes its own sleep for their silence."""
        observed = -math.inf
        while True:
            await asyncio.sleep(self._fleet.judge_every_s)
            now = self._state.clock()
            for _ in self._fleet.judge(now):
                await asyncio.sleep(0)
            if now - observed >= _OBSERVE_EVERY_S and not self._state.sheds(Work.VIEWS):
                observed = now
                metrics.observe(self._state.runs.values(), self._fleet.workers())
                metrics.interactive_slots.set(self._rounds.reserved_slots)

    async def reap_for_ever(self) -> None:
        next_due = math.inf
        self._recovery.serving()
        while True:
            await self._state.wakeups.wait_to_reap(min(TICK_S, max(0.0, next_due - self._state.clock())))
            now = self._state.clock()
            try:
                next_due = await self._attempts.requeue_due(now)
                await self._attempts.tally()
                await self._attempts.sweep_ended()
            except StoreUnavailable as error:
                log.warning("store away", reason=str(error))
                next_due = now + _STORE_PAUSE_S

    async def decide(self) -> None:
        """One round, after stale mirrors were read again. One that takes long is read on while others are served."""
        await self._recovery.try_skipped()
        await self._read_stale()
        for action in self._rounds.steps(self._state.clock()):
            await self._do(action)

    async def _read_stale(self) -> None:
        begun, reading = list[asyncio.Task[None]](), None
        for run in self._state.at_work(now := self._state.clock()):
            if not run.mirror.stale:
                await self._read(run)  # which waits for nothing
            elif run not in self._readings and not self._attempts.refused(run, now):
                reading = self._readings[run] = asyncio.create_task(self._read(run), name=f"refresh {run.run_id}")
                reading.add_done_callback(partial(self._was_read, run))
                begun.append(reading)
        try:
            if begun:
                await asyncio.wait(begun, timeout=_READ_S)
            for reading in begun:
                if reading.done():
                    reading.result()
        finally:
            begun.clear()
            reading = None  # its error refers to this frame: together they would be a cycle

    async def _read(self, run: RunState) -> None:
        async with self._attempts.while_it_lives(run):
            await self._recovery.refresh(run)

    def _was_read(self, run: RunState, reading: asyncio.Task[None]) -> None:
        self._readings.pop(run, None)
        if not reading.cancelled() and (error := reading.exception()) is not None:
            log.debug("run not read", run_id=run.run_id, reason=str(error))

    async def _do(self, action: Action) -> None:
        if action is None:
            await asyncio.sleep(0)
            return
        if self._attempts.refused(action.run, self._state.clock()):
            return
        async with self._attempts.while_it_lives(action.run):
            match action:
                case SlotFill():
                    await self._fill(action)
                case DeadLetters(run, letters):
                    await self._attempts.dead_letter(run, letters)
                case RunFailure(run, message):
                    await self._attempts.end_run(run.run_id, RunStatus.FAILED, message, drop=DropReason.RUN_ENDED)

    async def _fill(self, action: SlotFill) -> None:
        clock = self._state.clock
        while action.due(clock()):
            async with changing(action.run):
                placements = action.place(clock())
                if not placements:
                    return
                await self._attempts.start(action.run, placements, self._state.sessions)
            began = clock()
            await asyncio.sleep(0)
            turn_s = (now := clock()) - began
            action.note_turn(max(turn_s, self._state.overload.behind_s), now)


#: The lag's gauge shows the largest of so many ticks: a second.
_SHOWN: Final = round(1 / LAG_TICK_S)


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
        await asyncio.sleep(LAG_TICK_S)


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
