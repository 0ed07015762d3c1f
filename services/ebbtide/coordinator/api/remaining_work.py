"""Says what a run's rollouts still make: tells its trainer what is left of the open groups, and people when they end.

A large run is read a page at a time, so that tokens need not wait. Rollouts that end meanwhile are left out.
"""

import asyncio
import math
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from hashlib import blake2b
from statistics import fmean
from typing import Final, NamedTuple

from msgspec import Struct, field

from ebbtide.coordinator.forecasts.engine_pace import ThroughputPoint, fitted_pace, relative_speed
from ebbtide.coordinator.forecasts.throughput import WorkerThroughput
from ebbtide.coordinator.rules.rollout_queue import QueuedRollout
from ebbtide.coordinator.state.coordinator_state import CoordinatorState
from ebbtide.coordinator.state.run_state import RunState
from ebbtide.coordinator.state.worker_session import WorkerSession
from ebbtide.errors import InvalidRequest, LeaseSuperseded
from ebbtide.rpc.fair_limiter import end_turn
from ebbtide.types.fleet import WorkerKind, WorkerState
from ebbtide.types.remaining_work import MOST_GROUPS, MOST_WAIT_S, EnginePace, OpenGroup, RemainingWork
from ebbtide.types.run import LongRollout, RunOutlook

#: Rollouts that are looked at between two pauses: less than a millisecond's work.
_PAGE: Final = 512
#: How often a call that waits looks at the fleet.
_LOOK_S: Final = 0.2
#: Engines, evenly picked, whose speeds stand for a typical one's.
_TYPICAL: Final = 16
#: Engines whose speeds are compared between two pauses.
_ENGINES: Final = 64
_UNKNOWN: Final = EnginePace(step_s=0.0, rollout_s=0.0)

Speed = Callable[[WorkerSession], tuple[WorkerThroughput | None, float]]


class _Group(Struct):
    prompt: int = 0
    running: list[int] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)


class RemainingWorkReader:
    """`speed`: what was learnt of a worker."""

    def __init__(self, state: CoordinatorState, speed: Speed) -> None:
        self._state, self._speed = state, speed

    async def read(self, run_id: str, *, groups: int, fleet: str, wait_s: float) -> RemainingWork:
        """The oldest `groups` open groups, once the fleet is another than `fleet`, or after `wait_s`.

        Raises `LeaseSuperseded` if the run is over, and `InvalidRequest`.
        """
        if not 0.0 <= wait_s <= MOST_WAIT_S:
            raise InvalidRequest(f"must be 0 to {MOST_WAIT_S:g}", field="wait_s")
        end_turn()
        looks = math.ceil(wait_s / _LOOK_S) if fleet else 0
        for _ in range(looks):
            if fleet != self._fleet(self._run(run_id)):
                break
            await asyncio.sleep(_LOOK_S)
        steps = self.gather(self._run(run_id), groups)
        while True:
            try:
                next(steps)
            except StopIteration as done:
                left: RemainingWork = done.value
                return left
            await asyncio.sleep(0)

    def gather(self, run: RunState, groups: int) -> Generator[None, None, RemainingWork]:
        """Gathers what is left of a run, with a pause after each page."""
        found = _OpenGroups(run)
        yield from found.pages()
        sessions = _serving(self._state, run)
        speeds = yield from self._speeds(sessions)
        oldest = tuple(found.oldest(groups))
        pace = speeds.pace or _UNKNOWN
        return RemainingWork(
            fleet=self._fleet(run),
            groups=oldest,
            open=found.open,
            ended=found.ended,
            newest=run.versions.newest,
            engines=tuple(one.worker_id for one in sessions),
            speeds=tuple(speeds.relative),
            versions=tuple(one.version_of(run.run_id) for one in sessions),
            rollouts=tuple(len(one.attempts) for one in sessions),
            lent=tuple(not one.reclaimed for one in sessions),
            spot=tuple(one.hello.kind is WorkerKind.SPOT for one in sessions),
            shares=tuple(_share(one) for one in sessions),
            step_s=pace.step_s,
            rollout_s=pace.rollout_s,
            context_s=pace.context_s,
        )

    def _speeds(self, sessions: Sequence[WorkerSession]) -> Generator[None, None, "_Speeds"]:
        stride = -(-len(sessions) // _TYPICAL) or 1
        typical = [point for one in sessions[::stride] for point in self._points(one)]
        pace = fitted_pace(typical) if typical else None
        relative = list[float]()
        for number, one in enumerate(sessions):
            relative.append(relative_speed(self._points(one), pace) if pace else 1.0)
            if number % _ENGINES == _ENGINES - 1:
                yield
        return _Speeds(pace, relative)

    def _points(self, session: WorkerSession) -> list[ThroughputPoint]:
        learnt = self._speed(session)[0]
        return learnt.points() if learnt else []

    def _run(self, run_id: str) -> RunState:
        run = self._state.runs.get(run_id)
        if run is None:
            raise LeaseSuperseded(f"run {run_id} is not live; step down")
        return run

    def _fleet(self, run: RunState) -> str:
        seen = sorted(
            f"{one.session_id} {one.version_of(run.run_id)} {one.reclaimed}" for one in _serving(self._state, run)
        )
        return blake2b("\n".join(seen).encode(), digest_size=8).hexdigest()


class _Speeds(NamedTuple):
    pace: EnginePace | None  # None: nothing is known of any engine
    relative: list[float]


class _OpenGroups:
    """A run's groups of which not all responses have ended."""

    def __init__(self, run: RunState) -> None:
        self._run = run
        self._groups: dict[int, _Group] = {}
        self.open = self.ended = 0

    def pages(self) -> Iterator[None]:
        """Look at all rollouts, with a pause after each page."""
        for number, (one, made, runs) in enumerate(self._rollouts()):
            group = self._groups.setdefault(one.group, _Group())
            group.prompt = max(group.prompt, one.length - one.made)
            (group.running if runs else group.waiting).append(made)
            if number % _PAGE == _PAGE - 1:
                yield
        ended = self._run.episodes.responses.keys() - self._groups.keys()
        self.ended = len(ended)

    def oldest(self, count: int) -> list[OpenGroup]:
        """The oldest groups: all of them, or some evenly picked if there are many. Sets `open`."""
        places = sorted(self._groups)[:count]
        self.open = len(places)
        stride = max(1.0, len(places) / MOST_GROUPS)
        picked = (places[int(at * stride)] for at in range(min(len(places), MOST_GROUPS)))
        told = (self._groups[place] for place in picked)
        return [OpenGroup(prompt=one.prompt, running=tuple(one.running), waiting=tuple(one.waiting)) for one in told]

    def _rollouts(self) -> Iterator[tuple[QueuedRollout, int, bool]]:
        """Each rollout of training, the tokens of its response, and whether a worker generates it."""
        seen = set[str]()
        for attempt in list(self._run.running.values()):
            if not (attempt.rollout.evaluation or attempt.rollout.request):
                seen.add(attempt.rollout.rollout_id)
                yield attempt.rollout, attempt.stored, attempt.started and attempt.session is not None
        for queued in self._run.queue.training():
            if queued.rollout_id not in seen:  # else it was queued again between two pages
                yield queued, queued.made, False


def _serving(state: CoordinatorState, run: RunState) -> list[WorkerSession]:
    """The engines that generate for the run, or will soon."""
    found = state.serving(run.run_id)
    return [one for one in found if not one.draining and not one.given_up and one.state is not WorkerState.QUARANTINED]


def _share(session: WorkerSession) -> float:
    said = session.beat.borrowed
    return said.share if session.borrowed and said else float(not session.borrowed)


def run_outlook(run: RunState, sessions: Iterable[WorkerSession]) -> RunOutlook | None:
    """What is expected now; None while the run's responses have taught nothing. `sessions`: of the fleet."""
    forecasts, eta = run.lengths.forecasts, run.lengths.eta
    if not forecasts.known:
        return None
    speeds = [one.rollout_tokens_per_s for one in sessions if one.run_id == run.run_id and one.rollout_tokens_per_s]
    speed, count = fmean(speeds) if speeds else 0.0, forecasts.coverage.count
    return RunOutlook(
        half_s=eta.end.half / speed if speed else 0.0,
        ninth_s=eta.end.ninth / speed if speed else 0.0,
        tail=eta.end.tail,
        longest=tuple(
            LongRollout(
                rollout_id=name,
                stored=attempt.stored,
                expected_tokens=round(quantiles.expected),
                longest_tokens=round(quantiles.longest),
            )
            for name, quantiles in eta.latest
            if (attempt := run.running.get(name)) is not None
        ),
        intraclass_correlation=forecasts.learner.intraclass_correlation,
        forecast=count.ended,
        covered=count.covered,
    )
