"""Places and moves rollouts by the engines' queues, as RLBoost does (arXiv 2510.19225, section 4.4, Algorithm 2)."""

from collections import Counter
from collections.abc import Sequence
from typing import Final

from ebbtide.coordinator.forecasts.throughput import WorkerThroughput
from ebbtide.coordinator.rules.placement import Placement
from ebbtide.coordinator.state.run_state import RunState
from ebbtide.coordinator.state.running_attempt import RunningAttempt
from ebbtide.coordinator.state.worker_session import WorkerSession
from ebbtide.simulator.scenario.machine_events import pool_of
from ebbtide.simulator.world.rival_policies import POLL_S, RivalDecider, fits, request_release
from ebbtide.simulator.world.virtual_coordinator import VirtualCoordinator

#: Between two looks at the engines' queues. A rollout that was sent since the last look is not known to wait.
_LOOK_S: Final = POLL_S


class PendingBalance(RivalDecider):
    """`pending_limit`: Theta, the most rollouts that may wait in an engine; `sweep`: the most that are sent between two
    looks, to all engines together; `balance`: whether rollouts move.

    The table of throughput against batch size is recorded in one step and used in the next, for all engines alike.
    """

    def __init__(
        self, coordinator: VirtualCoordinator, *, keeps: bool, pending_limit: int, sweep: int, balance: bool
    ) -> None:
        super().__init__(coordinator, keeps=keeps)
        self._pending_limit, self._sweep, self._balance = pending_limit, sweep, balance
        self._sent, self._swept = 0, -_LOOK_S  # since the last look, and when that was
        self.table = WorkerThroughput()  # of the present step
        self._last_table = WorkerThroughput()
        self._step = 0
        self._seen: dict[str, tuple[int, int, float]] = {}  # session -> tokens, rollouts and uptime at the last look
        self._looked = 0.0
        self.local = ""  # the pool of engines on the trainer's devices
        self.most: int | None = None  # engines elsewhere that get work
        self._present = 0.0  # of engines elsewhere, summed over the seconds since `_began`
        self._began = self._noted = 0.0

    def remote(self) -> int:
        """Engines that get work and are not on the trainer's devices, now. The authors allocate no others."""
        present = sum(not self._is_local(one) for one in self._state.sessions.values())
        return present if self.most is None else min(present, self.most)

    def take_mean_remote(self, now: float) -> float:
        """How many there were on average since the last call."""
        self._note(now)
        passed, present = now - self._began, self._present
        self._began, self._present = now, 0.0
        return present / passed if passed > 0 else float(self.remote())

    def round(self, now: float) -> float:
        self._note(now)
        return super().round(now)

    def place(self, run: RunState, engines: Sequence[WorkerSession], now: float) -> list[Placement]:
        """Each goes to the engine where the fewest wait, or stays here if as many as allowed wait everywhere, or were
        sent since the last look."""
        if now - self._swept >= _LOOK_S:
            self._sent, self._swept = 0, now
        engines = self._used(engines)
        waiting = {engine.session_id: len(engine.pending) for engine in engines}
        room = {engine.session_id: engine.hello.slots - len(engine.attempts) for engine in engines}
        by_name = {engine.worker_id: engine for engine in engines}
        placements = []
        for one in list(run.queue):
            if self._sent >= self._sweep:
                break
            moved_to = by_name.get(one.prefer)
            open_ = [moved_to] if moved_to is not None and room[moved_to.session_id] > 0 else engines
            open_ = [
                engine
                for engine in open_
                if room[engine.session_id] > 0 and waiting[engine.session_id] < self._pending_limit
            ]
            if not open_ or not fits(one, open_[0], run):
                if not open_ and moved_to is None:
                    break
                continue
            engine = min(open_, key=lambda engine: waiting[engine.session_id])
            waiting[engine.session_id] += 1
            room[engine.session_id] -= 1
            self._sent += 1
            placements.append(Placement(one.rollout_id, engine.session_id))
        return placements

    def move(self, run: RunState, engines: Sequence[WorkerSession], now: float) -> None:
        if now - self._looked < _LOOK_S:
            return
        self._looked = now
        self._record(run, engines)
        engines = self._used(engines)
        if not self._balance or len(engines) < 2 or run.queue:
            return
        if not self._move_waiting(engines, now) and self.keeps:  # else a move would cost all tokens
            self._move_running(engines)

    def _move_waiting(self, engines: Sequence[WorkerSession], now: float) -> bool:
        """Move one from the longest queue to an engine without one, until that queues."""
        waiting = {one.session_id: self._waiting(one, now) for one in engines}
        arriving = _arriving(engines)
        idle = [one for one in engines if not one.pending and not arriving[one.worker_id]]
        longest = max(engines, key=lambda one: len(waiting[one.session_id]))
        if not idle or not waiting[longest.session_id]:
            return False
        request_release(longest, idle[0], waiting[longest.session_id][-1:])
        return True

    def _waiting(self, engine: WorkerSession, now: float) -> list[RunningAttempt]:
        """Those that the engine has not begun to read. What is being read would begin anew elsewhere, and never end
        where that takes longer than a look.
        """
        runs = self._coordinator.worker(engine.session_id).host.engine.runs
        return [a for a in engine.pending.values() if _waits(a, now) and not runs(a.rollout.rollout_id)]

    def _move_running(self, engines: Sequence[WorkerSession]) -> None:
        """If an engine executes nothing, move to it what the busiest one executes beyond the plateau."""
        arriving = _arriving(engines)
        idle = [one for one in engines if not one.attempts and not arriving[one.worker_id]]
        if not idle:
            return
        executing = {
            one.session_id: [a for a in one.attempts.values() if a.started and not a.target] for one in engines
        }
        busiest = max(engines, key=lambda one: len(executing[one.session_id]))
        plateau = self._last_table.plateau(_context(busiest))
        if plateau:
            request_release(busiest, idle[0], executing[busiest.session_id][plateau:])

    def _record(self, run: RunState, engines: Sequence[WorkerSession]) -> None:
        """Record throughput against batch size."""
        if run.versions.newest != self._step:
            self._step, self._last_table, self.table = run.versions.newest, self.table, WorkerThroughput()
        for engine in engines:
            beat, running = engine.beat, len(engine.attempts) - len(engine.pending)
            tokens, before, uptime_s = self._seen.get(engine.session_id, (0, 0, 0.0))
            self._seen[engine.session_id] = (beat.tokens_generated, running, beat.uptime_s)
            if before and running == before and beat.uptime_s > uptime_s:
                made, seconds = beat.tokens_generated - tokens, beat.uptime_s - uptime_s
                self.table.observe(running, _context(engine), made, seconds)

    def _used(self, engines: Sequence[WorkerSession]) -> list[WorkerSession]:
        """The engines on the trainer's devices, and as many others as help."""
        others = [one for one in engines if not self._is_local(one)]
        return [one for one in engines if self._is_local(one)] + others[: self.most]

    def _is_local(self, engine: WorkerSession) -> bool:
        return bool(self.local) and pool_of(engine.worker_id) == self.local

    def _note(self, now: float) -> None:
        self._present += self.remote() * (now - self._noted)
        self._noted = now


def _waits(attempt: RunningAttempt, now: float) -> bool:
    return not attempt.target and now - attempt.given >= _LOOK_S


def _arriving(engines: Sequence[WorkerSession]) -> Counter[str]:
    """Rollouts that were asked back for each engine."""
    return Counter(a.target for one in engines for a in one.attempts.values() if a.target)


def _context(engine: WorkerSession) -> float:
    lengths = [one.length for one in engine.attempts.values()]
    return sum(lengths) / max(1, len(lengths))
