"""Schedules with knowledge of all lengths and losses, at the costs that everybody pays: what a policy could do at best.

It is no bound, but a strong schedule: rollouts with most tokens left start first, where their engine ends soonest. An
engine's end is that of processor sharing with known lengths. No engine gets more rollouts than it runs at full speed.
Before a machine is lost its rollouts leave it, so nothing is lost with it, and nothing has to be noticed. A running
rollout moves where the step ends sooner by more than the move costs. A short one goes back to the queue where a long
one that waits would end the step. Moves and losses cost a hand-over and a prefill.
"""

from bisect import insort
from collections import Counter
from collections.abc import Mapping, Sequence
from heapq import nlargest
from itertools import islice
from math import inf
from typing import Final

from msgspec import Struct

from ebbtide.coordinator.rules.placement import Placement
from ebbtide.coordinator.rules.rollout_queue import QueuedRollout
from ebbtide.coordinator.state.run_state import RunState
from ebbtide.coordinator.state.running_attempt import RunningAttempt
from ebbtide.coordinator.state.worker_session import WorkerSession
from ebbtide.simulator.engines.engine_profile import StepCosts
from ebbtide.simulator.scenario.machine_pool import MachinePool
from ebbtide.simulator.scenario.training_run import TrainingRun
from ebbtide.simulator.world.rival_policies import RivalDecider, fits, request_release
from ebbtide.simulator.world.training.step_rounds import Rounds, WholeGroups
from ebbtide.simulator.world.training.trainer_loan import FixedWindow, LoanWindow
from ebbtide.simulator.world.virtual_coordinator import Decider, VirtualCoordinator

#: A machine's rollouts are asked back so long before its loss, a little longer than that takes.
_LEAVE_S: Final = 0.12
#: A machine gets no more rollouts so long before its loss.
_LAST_S: Final = 2.0
#: A hand-over, until the other engine begins to read.
_HANDOVER_S: Final = 0.1
#: Moves are looked for so often; so many in a look, of so many of an engine's longest rollouts; a rollout then stays.
_LOOK_S: Final = 5.0
_MOVES: Final = 8
_LONGEST: Final = 4
_STAY_S: Final = 20.0
#: A move must bring forward the end by so much more than it costs.
_GAIN_S: Final = 0.5
#: After rollouts left a machine they are queued within so long. Of so many that wait, those that would end the step by
#: so much later are put in the places of others, which have at most so large a share as many tokens to come.
_QUEUED_S: Final = 0.2
_WAITING: Final = 64
_LATE_S: Final = 2.0
_SHORTER: Final = 0.5


class _Left(Struct, frozen=True, order=True):
    """A rollout in an engine: tokens to come, and those of prompt and response so far."""

    rest: int
    context: int


class _Engine:
    """An engine and what it will do."""

    def __init__(self, session: WorkerSession, costs: StepCosts, speed: float, lost_s: float) -> None:
        self.session, self._costs, self._speed, self.lost_s = session, costs, speed, lost_s
        slots = session.hello.slots
        self.most = min(slots, costs.spare) if costs.spare else slots
        self.rollouts: list[_Left] = []
        self.reading_s = 0.0

    def add(self, one: _Left, reads: int) -> None:
        insort(self.rollouts, one)
        self.reading_s += self.read_s(reads)

    def read_s(self, tokens: int) -> float:
        return tokens * self._costs.token_s / self._speed

    def end_s(self, more: _Left | None = None, less: _Left | None = None) -> float:
        """Seconds until all have ended, with one rollout more, which is read, or less."""
        rollouts, reading_s = self.rollouts, self.reading_s
        if more is not None or less is not None:
            rollouts = list(rollouts)
        if more is not None:
            insort(rollouts, more)
            reading_s += self.read_s(more.context)
        if less is not None:
            rollouts.remove(less)
        return reading_s + self._shared_s(rollouts)

    def lasts_s(self, more: _Left, now: float) -> float:
        """Seconds until all have ended, with one more that has to move on if the machine is lost before its end."""
        end_s = self.end_s(more)
        if now + end_s <= self.lost_s:
            return end_s
        made = int((self.lost_s - now) / max(1e-9, end_s) * more.rest)
        return end_s + _HANDOVER_S + self.read_s(more.context + made)

    def _shared_s(self, rollouts: Sequence[_Left]) -> float:
        """Seconds of decoding until all have ended: between two ends all make a token in each step."""
        costs, running, made, passed_s = self._costs, len(rollouts), 0, 0.0
        if not running:
            return 0.0
        if not costs.context_s and running <= costs.spare:
            return rollouts[-1].rest * costs.step_s(batch=1, context=0) / self._speed
        context = float(sum(one.context for one in rollouts))
        for one in rollouts:
            steps = one.rest - made
            if steps > 0:
                passed_s += steps * costs.step_s(batch=running, context=context + running * steps / 2)
                context += running * steps
            context -= one.context + one.rest
            running, made = running - 1, max(made, one.rest)
        return passed_s / self._speed


class FairOracle(RivalDecider):
    def __init__(self, coordinator: VirtualCoordinator, losses: Mapping[str, float]) -> None:
        """`losses`: when machines are lost, by name."""
        super().__init__(coordinator, keeps=True)
        self._losses = losses
        self._lengths: dict[str, int] = {}
        self._left = set[str]()  # sessions whose rollouts were asked back
        self._looked = 0.0
        self._urgent = inf  # when rollouts that left a machine will wait

    def round(self, now: float) -> float:
        pause = super().round(now)
        leave = min((self._lost_s(one) for one in self._state.sessions.values() if self._stays(one)), default=inf)
        return max(0.001, min(pause, leave - _LEAVE_S - now, self._urgent - now))

    def _lost_s(self, session: WorkerSession) -> float:
        return self._losses.get(session.worker_id, inf)

    def _stays(self, session: WorkerSession) -> bool:
        return session.session_id not in self._left

    def place(self, run: RunState, engines: Sequence[WorkerSession], now: float) -> list[Placement]:
        """The rollouts with most tokens left go where their engine ends soonest, up to what runs at full speed."""
        found = [self._engine(one) for one in engines if now < self._lost_s(one) - _LAST_S]
        open_ = {one.session.worker_id: one for one in found if len(one.rollouts) < one.most}
        room = sum(one.most - len(one.rollouts) for one in open_.values())
        placements = []
        for one in nlargest(room, run.queue, key=self._rest):
            able = [engine for engine in open_.values() if fits(one, engine.session, run)]
            if not able:
                continue
            left = _Left(self._rest(one), one.length)
            engine = open_.get(one.prefer) or min(able, key=lambda engine: engine.lasts_s(left, now))
            engine.add(left, one.length)
            placements.append(Placement(one.rollout_id, engine.session.session_id))
            if len(engine.rollouts) >= engine.most:
                del open_[engine.session.worker_id]
        return placements

    def move(self, run: RunState, engines: Sequence[WorkerSession], now: float) -> None:
        for session in engines:
            if self._stays(session) and now >= self._lost_s(session) - _LEAVE_S - 1e-6:
                self._left.add(session.session_id)
                session.outbox.request_release([one.ref for one in session.attempts.values()])
                self._urgent = now + _QUEUED_S
        if now - self._looked < _LOOK_S and now < self._urgent:
            return
        staying = [one for one in engines if now < self._lost_s(one) - _LAST_S]
        found = [self._engine(one) for one in staying]
        if found and run.queue and all(len(one.rollouts) >= one.most for one in found):
            self._make_room(run, found)
        if now - self._looked >= _LOOK_S:
            self._looked = now
            self._balance(staying, found, now)
        self._urgent = inf if now >= self._urgent else self._urgent

    def _make_room(self, run: RunState, engines: Sequence[_Engine]) -> None:
        """Ask back the rollouts with fewest tokens to come for those that wait and would end the step if they did until
        places are free.
        """
        running = [(one.session, a) for one in engines for a in one.session.attempts.values() if not a.target]
        running.sort(key=lambda one: self._rest_of(one[1]))
        last = max(engines, key=lambda one: one.end_s())
        token_s = last.end_s() / max(1, last.rollouts[-1].rest)
        rests = [self._rest_of(attempt) for _, attempt in running]
        tokens = sum(rests) + sum(map(self._rest, run.queue))
        end_s = max(last.end_s(), token_s * tokens / len(running))
        shortest = iter(running)
        for wait, one in zip(rests, nlargest(_WAITING, run.queue, key=self._rest), strict=False):
            if token_s * (wait + self._rest(one)) <= end_s + _LATE_S:
                continue
            session, attempt = next(shortest)
            if self._rest_of(attempt) > _SHORTER * self._rest(one):
                break
            session.outbox.request_release([attempt.ref])

    def _balance(self, sessions: Sequence[WorkerSession], engines: Sequence[_Engine], now: float) -> None:
        """Move rollouts away from the engine that ends last, as long as that brings forward its end."""
        coming = Counter(a.target for one in sessions for a in one.attempts.values() if a.target)
        for _ in range(_MOVES):
            last = max(engines, key=lambda one: one.end_s(), default=None)
            if last is None or not self._moved(last, engines, coming, now):
                return

    def _moved(self, last: _Engine, engines: Sequence[_Engine], coming: Counter[str], now: float) -> bool:
        """Move the rollout by which most is gained. Returns whether one was moved."""
        end_s = last.end_s()
        best: tuple[float, RunningAttempt, _Engine, _Left] | None = None
        mine = [a for a in last.session.attempts.values() if a.started and not a.target and now - a.given >= _STAY_S]
        for attempt in islice(sorted(mine, key=self._rest_of, reverse=True), _LONGEST):
            left = _Left(self._rest_of(attempt), attempt.length)
            for target in engines:
                name = target.session.worker_id
                if target is last or len(target.rollouts) + coming[name] >= target.most:
                    continue
                read_s = target.read_s(left.context)
                ends_s = max(last.end_s(less=left), target.lasts_s(left, now) + _HANDOVER_S) + read_s + _GAIN_S
                if ends_s < (best[0] if best else end_s):
                    best = ends_s, attempt, target, left
        if best is None:
            return False
        _, attempt, target, left = best
        request_release(last.session, target.session, [attempt])
        last.rollouts.remove(left)
        target.add(left, left.context)
        return True

    def _engine(self, session: WorkerSession) -> _Engine:
        worker = self._coordinator.worker(session.session_id)
        found = _Engine(session, worker.terms.profile.costs, worker.speed, self._lost_s(session))
        for attempt in session.attempts.values():
            if not attempt.target:
                reads = 0 if attempt.started else attempt.length
                found.add(_Left(self._rest_of(attempt), attempt.length), reads)
        return found

    def _rest(self, one: QueuedRollout) -> int:
        return self._length(one.rollout_id) - one.made

    def _rest_of(self, attempt: RunningAttempt) -> int:
        return self._length(attempt.rollout.rollout_id) - attempt.stored

    def _length(self, rollout_id: str) -> int:
        found = self._lengths.get(rollout_id)
        if found is None:
            found = self._lengths[rollout_id] = self._coordinator.response(rollout_id).length
        return found


class FairOraclePolicy(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Knows every length, and when each machine is lost (`losses`, by the machine's name)."""

    losses: dict[str, float] = {}

    @property
    def stream_batch(self) -> int | None:
        return None

    def decider(self, coordinator: VirtualCoordinator) -> Decider:
        return FairOracle(coordinator, self.losses)

    def rounds(self, run: TrainingRun) -> Rounds:
        return WholeGroups(run.prompts, run.group)

    def window(self, decider: Decider, lent: MachinePool) -> LoanWindow:
        del decider
        return FixedWindow(lent.window_s)
