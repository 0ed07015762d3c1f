"""Keeps what a policy of divided rollouts sees of a step: where each response runs, and how far it has come.

Live, workers report this with every flush, several times a second. Here it is read from the engines at each round.

Invariant: a member is in `_open` until it ended. One that runs is in exactly one engine's view.
"""

from collections.abc import Iterable, Sequence

from msgspec import Struct

from ebbtide.coordinator.rules.rollout_queue import QueuedRollout
from ebbtide.coordinator.state.run_state import RunState
from ebbtide.coordinator.state.running_attempt import RunningAttempt
from ebbtide.coordinator.state.worker_session import WorkerSession
from ebbtide.simulator.engines.simulated_engine import SimulatedEngine
from ebbtide.simulator.world.virtual_coordinator import VirtualCoordinator


class StepMember(Struct, eq=False, kw_only=True):
    """One response. Lengths in tokens."""

    rollout_id: str
    group: int
    prompt: int
    place: int
    cap: int
    length: int  # the truth: for oracles, and for models of what happens
    probe: bool  # the first of its group
    made: int = 0
    until: int = 0  # of the response: it has memory up to here
    engine: str = ""  # the session that runs it; "": it waits
    home: str = ""  # the session that ran it last
    since: float = 0.0  # when it came to its engine, or began to wait
    leaving: bool = False  # it was asked back
    ended: bool = False
    attempt: RunningAttempt | None = None

    @property
    def context(self) -> int:
        """Tokens of prompt and response."""
        return self.prompt + self.made


class EngineView(Struct, eq=False, kw_only=True):
    """One engine and what it runs. `leaving`: tokens of those that were asked back and still have memory."""

    session: WorkerSession
    engine: SimulatedEngine
    kv_tokens: int
    slots: int
    members: list[StepMember]
    leaving: int = 0


class StepMembers:
    def __init__(self, coordinator: VirtualCoordinator) -> None:
        self._coordinator = coordinator
        self._open: dict[str, StepMember] = {}
        self.groups: dict[int, list[StepMember]] = {}  # with open members
        self.waiting: list[StepMember] = []
        self.ended: list[StepMember] = []  # since the round before

    @property
    def open(self) -> Iterable[StepMember]:
        return self._open.values()

    def refresh(self, run: RunState, engines: Sequence[WorkerSession], now: float) -> list[EngineView]:
        """Look at the queue and at all engines. Returns a view of each engine."""
        self.waiting = [self._queued(run, one, now) for one in run.queue]
        views = [self._view(run, engine, now) for engine in engines]
        over = [key for key in self._open if key not in run.queue and key not in run.running]
        self.ended = [self._open.pop(key) for key in over]
        for one in self.ended:
            self._end(one)
        return views

    def _queued(self, run: RunState, queued: QueuedRollout, now: float) -> StepMember:
        member = self._open.get(queued.rollout_id)
        if member is None:
            return self._new(run, queued, now)
        if member.engine:
            member.engine, member.leaving, member.since, member.attempt = "", False, now, None
            member.made = queued.made
        return member

    def _new(self, run: RunState, queued: QueuedRollout, now: float) -> StepMember:
        response = self._coordinator.response(queued.rollout_id)
        siblings = self.groups.setdefault(queued.group, [])
        member = StepMember(
            rollout_id=queued.rollout_id,
            group=queued.group,
            prompt=response.prompt,
            place=queued.place,
            cap=run.spec.sampling.max_tokens,
            length=response.length,
            probe=not siblings,
            since=now,
        )
        siblings.append(member)
        self._open[queued.rollout_id] = member
        return member

    def _view(self, run: RunState, session: WorkerSession, now: float) -> EngineView:
        worker = self._coordinator.worker(session.session_id)
        profile, made = worker.terms.profile, worker.host.progress()
        view = EngineView(
            session=session,
            engine=worker.host.engine,
            kv_tokens=profile.kv.tokens,
            slots=min(worker.terms.slots, profile.sequences),
            members=[],
        )
        for attempt in session.attempts.values():
            member = self._open.get(attempt.rollout.rollout_id) or self._new(run, attempt.rollout, now)
            member.made = max(member.made, made.get(member.rollout_id, 0))
            member.attempt = attempt
            if member.leaving:
                view.leaving += member.context
            else:
                view.members.append(member)
        return view

    def _end(self, member: StepMember) -> None:
        member.ended, member.made, member.engine, member.attempt = True, member.length, "", None
        group = self.groups[member.group]
        if all(one.ended for one in group):
            del self.groups[member.group]
