"""Has each worker offer as many slots as its memory holds rollouts of its run, up to those that it is set to.

Invariant: `_beats` has the last heartbeat of each worker that was looked at, and `_peaks` a table for each run. Lost
with the process: a worker's own slots count until it is heard of again.
"""

from collections.abc import Iterator
from typing import Final

from msgspec import Struct

from ebbtide.coordinator.state.coordinator_state import CoordinatorState
from ebbtide.coordinator.state.run_state import RunState
from ebbtide.coordinator.state.worker_reports import HeartbeatReport
from ebbtide.coordinator.state.worker_session import WorkerSession
from ebbtide.scheduling.dispatch.mixed_fleet.memory_slots import PeakTokens, memory_slots

#: A run's lengths change little within this.
_TABLE_S: Final = 2.0
#: Workers whose rollouts are summed up in one step.
_PART: Final = 100


class _Table(Struct):
    peaks: PeakTokens
    made: float  # when
    prompts: float = 0.0  # tokens of prompts, over the rollouts counted since then
    rollouts: int = 0

    @property
    def prompt(self) -> float:
        return self.prompts / max(1, self.rollouts)


class MemoryOffers:
    def __init__(self, state: CoordinatorState) -> None:
        self._state = state
        self._beats: dict[str, HeartbeatReport] = {}  # by session
        self._peaks: dict[str, _Table] = {}  # by run

    def update(self, now: float) -> Iterator[None]:
        """Look at the workers that were heard of since the last call, some in each step: others have their turn."""
        sessions = [one for one in self._state.sessions.values() if one.hello.engine.kv_tokens]
        self._beats = {one.session_id: beat for one in sessions if (beat := self._beats.get(one.session_id))}
        self._peaks = {run_id: table for run_id, table in self._peaks.items() if run_id in self._state.runs}
        fresh = [one for one in sessions if self._beats.get(one.session_id) is not one.beat]
        for at, session in enumerate(fresh, 1):
            self._beats[session.session_id] = session.beat
            if (run := self._state.runs.get(session.run_id)) is not None:
                self._offer(session, run, now)
            if not at % _PART:
                yield

    def _offer(self, session: WorkerSession, run: RunState, now: float) -> None:
        attempts = session.attempts.values()
        made = sum(one.stored for one in attempts)
        table = self._table(run, now)
        table.prompts += sum(one.length for one in attempts) - made
        table.rollouts += len(attempts)
        running = len(attempts)
        slots = memory_slots(
            table.peaks,
            kv_tokens=session.hello.engine.kv_tokens,
            # More than wait there already could not start, and would be of no use elsewhere.
            most=min(session.hello.slots, max(1, running)) if session.beat.unadmitted else session.hello.slots,
            running=running,
            made=made / max(1, running),
        )
        session.offer(slots)

    def _table(self, run: RunState, now: float) -> _Table:
        known = self._peaks.get(run.run_id)
        if known is None:
            waiting = next(iter(run.queue), None)
            prompt = float(waiting.length - waiting.made) if waiting is not None else 0.0
            known = self._peaks[run.run_id] = _Table(PeakTokens(run.tail.lengths, prompt), now)
        elif now - known.made >= _TABLE_S and known.rollouts:
            known = self._peaks[run.run_id] = _Table(PeakTokens(run.tail.lengths, known.prompt), now)
        return known
