"""Plays sessions without end: at each place, a session follows the one before it, turn by turn.

Invariant: a place has one turn that the coordinator knows, or its environment is at work.
"""

from collections.abc import Sequence
from functools import partial

from msgspec import Struct

from benchmarks.turn_routing.session_work import SessionWork
from ebbtide.simulator.scenario.workload import Turn
from ebbtide.simulator.world.virtual_coordinator import SimulatedRollout, VirtualCoordinator
from ebbtide.simulator.world.virtual_time import VirtualTime
from ebbtide.step_pacing import VersionBounds

RUN = "sessions"


class CrowdCounts(Struct):
    """What ended. Tokens, unless stated."""

    turns: int = 0
    responses: int = 0
    prompts: int = 0
    repeated: int = 0  # of the prompts, what earlier turns of the session had
    turn_s: float = 0.0  # from submission to the last token, over all turns


class _Place(Struct, eq=False):
    number: int = -1
    turns: Sequence[Turn] = ()
    at: int = 0
    submitted: float = 0.0


class SessionCrowd:
    def __init__(
        self, places: int, work: SessionWork, time: VirtualTime, coordinator: VirtualCoordinator, over_s: float
    ) -> None:
        """`places`: sessions at a time, which begin within `over_s`."""
        self._work, self._time, self._coordinator, self._over_s = work, time, coordinator, over_s
        self._places = [_Place() for _ in range(places)]
        self._live: dict[str, int] = {}
        self._submitted = 0
        self.counts = CrowdCounts()

    def begin(self) -> None:
        for place in range(len(self._places)):
            self._time.at(self._work.begins_s(place, self._over_s), partial(self._open, place))

    def ended(self, rollout: SimulatedRollout) -> None:
        """Count a turn; the next one follows once its environment has answered."""
        at = self._live.pop(rollout.rollout_id)
        place = self._places[at]
        turn = place.turns[place.at]
        before = place.turns[place.at - 1] if place.at else None
        counts = self.counts
        counts.turns += 1
        counts.responses += turn.response
        counts.prompts += turn.prompt
        counts.repeated += before.prompt + before.response if before else 0
        counts.turn_s += self._time.now - place.submitted
        place.at += 1
        if place.at < len(place.turns):
            self._time.after(turn.wait_s, lambda: self._submit(at))
        else:
            state = self._coordinator.state
            state.episode_over(state.runs[RUN], rollout.episode_id)
            self._time.after(turn.wait_s, lambda: self._open(at))

    def _open(self, at: int) -> None:
        place = self._places[at]
        place.number += 1
        place.turns, place.at = self._work.turns(at, place.number), 0
        self._submit(at)

    def _submit(self, at: int) -> None:
        place, name = self._places[at], f"{at}.{self._places[at].number}"
        turn, order = place.turns[place.at], self._submitted
        self._submitted += 1
        rollout = SimulatedRollout(
            rollout_id=f"{name}.{place.at}",
            episode_id=name,
            run=RUN,
            step=place.number,
            group=at,
            bounds=VersionBounds(1, 1),
            prompt=turn.prompt,
            length=turn.response,
            prefix=name,
            after=tuple(f"{name}.{earlier}" for earlier in reversed(range(place.at))),
            place=order,
        )
        self._live[rollout.rollout_id] = at
        place.submitted = self._time.now
        self._coordinator.submit([rollout])
