"""Runs the rounds of policies that stop and go on with rollouts as they like: what all of them have in common."""

from collections.abc import Sequence

from benchmarks.rivals.tail.kv_pool import KvPool
from benchmarks.rivals.tail.speculation_pace import SpeculationPace
from benchmarks.rivals.tail.step_members import EngineView, StepMember, StepMembers
from ebbtide.coordinator.rules.placement import Placement
from ebbtide.coordinator.state.run_state import RunState
from ebbtide.coordinator.state.worker_session import WorkerSession
from ebbtide.simulator.world.fleet.attempt_host import Response
from ebbtide.simulator.world.rival_policies import RivalDecider
from ebbtide.simulator.world.virtual_coordinator import SimulatedRollout, VirtualCoordinator

#: Rounds come at least so often, as multiples of the shortest pause between two.
_SELDOM = 2.0


class DividedDecider(RivalDecider):
    """`round_s`: the shortest pause between rounds; `pool`: of keys and values; `pace`: what speculation makes of the
    engines' speed, if they speculate.
    """

    def __init__(
        self, coordinator: VirtualCoordinator, *, round_s: float, pool: KvPool | None, pace: SpeculationPace | None
    ) -> None:
        super().__init__(coordinator, keeps=True)
        self._pool, self.poll_s = pool, _SELDOM * round_s
        self._round_s, self._pace = round_s, pace
        self.members = StepMembers(coordinator)

    def response(self, rollout: SimulatedRollout) -> Response:
        found, bounds = super().response(rollout), rollout.bounds
        if self._pool is None or not rollout.stored or bounds.minimum != bounds.maximum:
            return found  # other weights' keys and values are of no use
        carried = rollout.prompt + rollout.stored
        return found._replace(carried=carried, copy_s=self._pool.copy_s(carried))

    def gather_s(self) -> float:
        return self._round_s

    def place(self, run: RunState, engines: Sequence[WorkerSession], now: float) -> list[Placement]:
        """Nothing: `divide` decides on all of it."""
        del run, engines, now
        return []

    def move(self, run: RunState, engines: Sequence[WorkerSession], now: float) -> None:
        if not engines:
            return
        views = self.members.refresh(run, engines, now)
        self.divide(run, views, now)
        if self._pace is not None:
            self._pace.update(self.members, views, now)

    def divide(self, run: RunState, views: Sequence[EngineView], now: float) -> None:
        """Decide what begins, goes on and stops."""
        raise NotImplementedError

    # What decisions come to.

    def start(self, run: RunState, placements: Sequence[tuple[StepMember, EngineView]], now: float) -> None:
        """Have waiting members run."""
        for member, view in placements:
            member.engine = member.home = view.session.session_id
            member.since = now
        self._coordinator.start(
            run, [Placement(member.rollout_id, view.session.session_id) for member, view in placements]
        )

    def stop(self, view: EngineView, members: Sequence[StepMember], target: EngineView | None = None) -> None:
        """Have members of an engine wait again. `target`: where they will go on."""
        attempts = [one.attempt for one in members if one.attempt is not None]
        for member in members:
            member.leaving = True
        for attempt in attempts:
            if target is not None:
                attempt.move_to(target.session.worker_id)
        if attempts:
            view.session.outbox.request_release([attempt.ref for attempt in attempts])
