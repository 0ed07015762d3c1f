"""Puts decisions into practice: runs the rounds, does in the store what they yield, and keeps the workers judged.

Three loops run. `decide` acts on changes; `reap` re-queues orphans and deletes ended runs; both retry while the store
is away. `watch` judges the workers, and waits only for the clock.
"""

import asyncio
import math
from functools import partial
from typing import Final

from ebbtide import telemetry
from ebbtide.coordinator import metrics
from ebbtide.coordinator.dispatch.dispatch_round import TICK_S, Deed, DispatchRound, SlotFill, gather_s
from ebbtide.coordinator.dispatch.unserved_work import DeadLetters, RunFailure
from ebbtide.coordinator.fleet.worker_registry import WorkerRegistry
from ebbtide.coordinator.rules.overload import Work
from ebbtide.coordinator.run_recovery import RunRecovery
from ebbtide.coordinator.state.attempt_transitions import AttemptTransitions
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
                metrics.interactive_slots.set(self._rounds.kept_slots)

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
        for deed in self._rounds.turns(self._state.clock()):
            await self._do(deed)

    async def _read_stale(self) -> None:
        begun, reading = list[asyncio.Task[None]](), None
        for run in self._state.at_work(now := self._state.clock()):
            if not run.stale:
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

    async def _do(self, deed: Deed) -> None:
        if deed is None:
            await asyncio.sleep(0)
            return
        if self._attempts.refused(deed.run, self._state.clock()):
            return
        async with self._attempts.while_it_lives(deed.run):
            match deed:
                case SlotFill():
                    await self._fill(deed)
                case DeadLetters(run, letters):
                    await self._attempts.dead_letter(run, letters)
                case RunFailure(run, message):
                    await self._attempts.end_run(run.run_id, RunStatus.FAILED, message, drop=DropReason.RUN_ENDED)

    async def _fill(self, deed: SlotFill) -> None:
        clock = self._state.clock
        while deed.due(clock()):
            async with deed.run.changing():
                placements = deed.place(clock())
                if not placements:
                    return
                await self._attempts.start(deed.run, placements, self._state.sessions)
            began = clock()
            await asyncio.sleep(0)
            turn_s = (now := clock()) - began
            deed.note_turn(max(turn_s, self._state.overload.behind_s), now)
