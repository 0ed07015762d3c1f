"""Sends whole groups to engines in turn, as RLBoost's public code does (Terra-Flux/PolyRL, `main` of December 2025).

By written notes on that code: about once a second it looks at all engines, and until the next look it sends at most
four groups, in turn to the engines in which nothing waited then. A group is one request. So it goes on elsewhere as
one, with as many tokens as its shortest response has, also where that one has ended. That code then makes the ended
ones again, too, which is left out here: to the rival's advantage.
"""

from collections.abc import Sequence
from itertools import groupby

from benchmarks.rivals.rlboost.pending_balance import PendingBalance
from ebbtide.coordinator.rules.placement import Placement
from ebbtide.coordinator.state.run_state import RunState
from ebbtide.coordinator.state.worker_session import WorkerSession
from ebbtide.simulator.world.rival_policies import POLL_S, fits
from ebbtide.simulator.world.virtual_coordinator import SimulatedRollout, VirtualCoordinator


class GroupSweeps(PendingBalance):
    """`sweep`: rollouts that are sent between two looks, in whole groups. Nothing moves but what lost its engine."""

    def __init__(self, coordinator: VirtualCoordinator, *, keeps: bool, sweep: int) -> None:
        super().__init__(coordinator, keeps=keeps, pending_limit=sweep, sweep=sweep, balance=False)
        self._turn, self._idle = 0, frozenset[str]()  # engines in which nothing waited at the last look
        self._groups: dict[tuple[int, int], dict[str, SimulatedRollout]] = {}  # that were sent

    def kept(self, rollout: SimulatedRollout) -> int:
        return min(one.stored for one in self._groups[rollout.step, rollout.group].values())

    def place(self, run: RunState, engines: Sequence[WorkerSession], now: float) -> list[Placement]:
        if now - self._swept >= POLL_S:
            self._sent, self._swept = 0, now
            self._idle = frozenset(one.session_id for one in engines if not one.pending)
        able = [one for one in engines if one.session_id in self._idle]
        placements: list[Placement] = []
        waiting = sorted((one for one in run.queue if fits(one, engines[0], run)), key=lambda one: one.group)
        for _, samples in groupby(waiting, key=lambda one: one.group):
            group = list(samples)
            open_ = [one for one in able if one.hello.slots - len(one.attempts) >= len(group)]
            if not open_ or (self._sent and self._sent + len(group) > self._sweep):
                break
            engine = open_[self._turn % len(open_)]
            self._turn += 1
            self._sent += len(group)
            for one in group:
                rollout = self._coordinator.rollout(one.rollout_id)
                self._groups.setdefault((rollout.step, rollout.group), {})[rollout.rollout_id] = rollout
            placements += [Placement(one.rollout_id, engine.session_id) for one in group]
        return placements
