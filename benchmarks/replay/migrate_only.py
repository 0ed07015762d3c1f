"""Ebbtide without its rule of balancing, as it was before that rule was written anew (commit 95636729).

All queued rollouts are given to engines at once, and none moves but those whose engine was lost, which go on with their
tokens. The policy is kept apart from the coordinator's, so that what balancing gains has always the same measure.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import islice
from statistics import median
from typing import Final, TypeAlias

from msgspec import Struct

from benchmarks.replay.learnt_rates import LearntRates
from ebbtide.coordinator.rules.placement import Placement
from ebbtide.coordinator.rules.rollout_queue import QueuedRollout
from ebbtide.coordinator.rules.worker_view import admits
from ebbtide.coordinator.state.run_state import RunState
from ebbtide.coordinator.state.worker_session import WorkerSession
from ebbtide.simulator.scenario.machine_pool import MachinePool
from ebbtide.simulator.scenario.training_run import TrainingRun
from ebbtide.simulator.world.rival_policies import RivalDecider
from ebbtide.simulator.world.training.step_rounds import Rounds, WholeGroups
from ebbtide.simulator.world.training.trainer_loan import FixedWindow, LoanWindow
from ebbtide.simulator.world.virtual_coordinator import Decider, VirtualCoordinator

#: The longest pause between two rounds, and the least between two looks at versions.
_TICK_S: Final = 0.25
_ARRANGE_S: Final = 0.05
#: Rollouts placed before the workers are looked at again.
_AT_ONCE: Final = 128
#: A worker is faster, and a rollout longer, if it is so by this factor.
_CLEARLY: Final = 1.25
#: A tenth of each power of ten up to beyond the tokens/s of any engine, and where each power's numbers end.
_STEPS: Final = tuple(0.1 * 10.0**digits for digits in range(20))
_TENS: Final = tuple(10.0**digits for digits in range(1, 20))

_Rank: TypeAlias = tuple[float, float, int]


class _View(Struct, frozen=True):
    """What is known of a worker: tokens/s of each of its rollouts with one more, and up to how many that holds."""

    rate: float
    plateau: int


class _Room:
    """A worker in a round's placements. `at`: its place in the order of names."""

    def __init__(self, session: WorkerSession, view: _View, at: int, rate: float, plateau: float) -> None:
        self.session, self.view, self._at = session, view, at
        self._rate, self._plateau = view.rate or rate, view.plateau or plateau
        self._running, self._given = len(session.attempts), 0
        self._barren = sum(one.rollout.no_progress > 0 for one in session.pending.values())
        self.rank = self._rank()

    def may_take(self, one: QueuedRollout) -> bool:
        """Whether it has a slot. One rollout alone that made nothing in its last attempt may wait for its start."""
        return self._running + self._given < self.session.slots and not (one.no_progress and self._barren)

    def take(self, one: QueuedRollout) -> None:
        self._given += 1
        self._barren += one.no_progress > 0
        self.rank = self._rank()

    def _rank(self) -> _Rank:
        """The least is best: by the predicted rate in steps of a tenth, then by the share of free slots, then by name.
        Beyond the plateau all rollouts share its throughput.
        """
        beside, slots, speed = self._running + self._given, self.session.slots, self._rate
        if self._given:
            # In this order, as it was: a tenth may hang on the last digit.
            speed = speed * max(self._running + 1, self._plateau) / max(beside + 1, self._plateau)
        return -_tenths(speed), -(slots - beside) / slots, -self._at


def _tenths(rate: float) -> float:
    step = _STEPS[bisect_right(_TENS, rate)]
    return round(rate / step) * step


class MigrateOnly(RivalDecider):
    def __init__(self, coordinator: VirtualCoordinator) -> None:
        super().__init__(coordinator, keeps=True)
        self._rates = LearntRates()
        self._seen: dict[str, tuple[tuple[int, ...], _View]] = {}  # by session: what the view was derived of, and it
        self._arranged = -_ARRANGE_S

    def round(self, now: float) -> float:
        arranges = self._arranged + _ARRANGE_S <= now
        if arranges:
            self._arranged = now
            self._arrange(now)
        learnt = self._rates.learn(self._state.sessions, now)
        for run in self._state.runs.values():
            while run.queue and (placements := self.place(run, self._serving(run), now)):
                self._coordinator.start(run, placements)
            if learnt:
                self._rooms(self._serving(run))  # so that views are as old as they were
        return _TICK_S if arranges else _ARRANGE_S

    def _arrange(self, now: float) -> None:
        """Have all workers serve the run, and install its versions."""
        for run in self._state.runs.values():
            for session in self._state.sessions.values():
                if session.run_id != run.run_id:
                    session.serve(run.run_id, now)
            self._installs.send(run, now)

    def _serving(self, run: RunState) -> list[WorkerSession]:
        """The workers that have a version and may get rollouts, in the order of their names."""
        return sorted(
            (one for one in self._state.serving(run.run_id) if one.version_of(run.run_id) and not one.draining),
            key=lambda one: one.session_id,
        )

    def place(self, run: RunState, engines: Sequence[WorkerSession], now: float) -> list[Placement]:  # noqa: ARG002
        """Each in the order of the queue goes where it will be fastest; then the longest get the fastest workers."""
        rooms = self._rooms(engines)
        placed: list[tuple[QueuedRollout, _Room]] = []
        for one in islice(run.queue, _AT_ONCE):
            open_ = [room for room in rooms if _serves(room.session, one, run) and room.may_take(one)]
            if open_:
                room = min(open_, key=lambda room: room.rank)
                room.take(one)
                placed.append((one, room))
        return [Placement(one.rollout_id, room.session.session_id) for one, room in _matched(placed, run)]

    def _rooms(self, engines: Iterable[WorkerSession]) -> list[_Room]:
        views = [(session, self._view(session)) for session in engines]
        rate = median([view.rate for _, view in views if view.rate] or [0.0])
        plateau = median([view.plateau for _, view in views if view.plateau] or [0])
        return [_Room(session, view, at, rate, plateau) for at, (session, view) in enumerate(views)]

    def _view(self, session: WorkerSession) -> _View:
        """Of the worker as it was at the last change of what it is derived of."""
        rates, name = self._rates, session.session_id
        lesson = -1 if rates.knows(session) else rates.lesson
        basis = (session.revision, rates.lessons.get(name, 0), lesson)
        known = self._seen.get(name)
        if known is None or known[0] != basis:
            self._seen[name] = known = basis, _View(rates.rate(session), rates.plateaus.get(name, 0))
        return known[1]


def _serves(session: WorkerSession, one: QueuedRollout, run: RunState) -> bool:
    """Whether the version that the worker has, and the one that it changes to, may make the rollout's tokens."""
    coming = session.target[1] if session.target else 0
    return admits(one.bounds, session.version_of(run.run_id)) and admits(one.bounds, coming)


def _matched(placed: list[tuple[QueuedRollout, _Room]], run: RunState) -> list[tuple[QueuedRollout, _Room]]:
    """The placements, where longer rollouts have taken the places of shorter ones at faster workers."""
    free = [at for at, (one, _) in enumerate(placed) if not one.no_progress]
    speeds = {at: placed[at][1].view.rate for at in free}
    if not free or max(speeds.values()) <= _CLEARLY * min(speeds.values()):
        return placed
    rests = {at: run.lengths.curve.rest(placed[at][0].made, placed[at][0].budget or None) for at in free}
    short = sorted(free, key=lambda at: (rests[at], at))
    made, moved = list(placed), set[int]()
    for at in sorted(free, key=lambda at: (-rests[at], at)):
        if at in moved:
            continue
        for other in short:
            if rests[at] <= _CLEARLY * rests[other]:
                break
            if other not in moved and speeds[other] > _CLEARLY * speeds[at]:
                made[at], made[other] = (placed[other][0], placed[at][1]), (placed[at][0], placed[other][1])
                moved |= {at, other}
                break
    return made


class MigrateOnlyPolicy(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a lost worker had stored goes on elsewhere, and nothing else moves."""

    @property
    def stream_batch(self) -> int | None:
        return None

    def decider(self, coordinator: VirtualCoordinator) -> Decider:
        return MigrateOnly(coordinator)

    def rounds(self, run: TrainingRun) -> Rounds:
        return WholeGroups(run.prompts, run.group)

    def window(self, decider: Decider, lent: MachinePool) -> LoanWindow:
        del decider
        return FixedWindow(lent.window_s)
