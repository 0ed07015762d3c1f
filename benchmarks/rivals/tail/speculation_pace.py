"""Models grouped speculation as a change of an engine's pace: more tokens in a step, and longer steps.

All samples of an engine advance by the mean of what their drafts gain, so an engine's step keeps its closed form. The
step's cost of draft tokens is the profile's, as if they were read. Real samples differ: those with many siblings
advance faster.
"""

from collections.abc import Sequence
from typing import Final

from benchmarks.rivals.seer_draft_rule import printed_drafts
from benchmarks.rivals.tail.sibling_drafts import sibling_survival
from benchmarks.rivals.tail.step_members import EngineView, StepMember, StepMembers
from ebbtide.simulator.engines.engine_profile import StepCosts
from ebbtide.simulator.world.virtual_coordinator import VirtualCoordinator

#: To look a sample's draft up: a suffix tree in C++ takes 1 to 2.2 us at a depth of 24.
_LOOK_UP_S: Final = 2e-6
#: Smaller changes of pace are not worth an event.
_CHANGE: Final = 0.01


class SpeculationPace:
    """`verification`: cost of draft tokens, as a multiple of the profile's; `every_s`: paces are set anew so often."""

    def __init__(self, coordinator: VirtualCoordinator, *, verification: float, every_s: float) -> None:
        self._coordinator = coordinator
        self._verification, self._every_s = verification, every_s
        self._next = 0.0
        self._paces: dict[str, float] = {}

    def is_due(self, now: float) -> bool:
        """Whether `update` would do anything."""
        return now >= self._next

    def update(self, members: StepMembers, views: Sequence[EngineView], now: float) -> None:
        """Set the pace of all engines, if it is time."""
        if not self.is_due(now):
            return
        self._next = now + self._every_s
        known = {group: sum(map(_share, some)) for group, some in members.groups.items()}
        for view in views:
            if not view.members:
                continue
            pace = self._gain(view, known)
            former = self._paces.get(view.session.session_id, 1.0)
            if abs(pace - former) > _CHANGE * former:
                self._paces[view.session.session_id] = pace
                self._coordinator.worker(view.session.session_id).pace(pace)

    def _gain(self, view: EngineView, known: dict[int, float]) -> float:
        running = [one for one in view.members if view.engine.runs(one.rollout_id)]
        if not running:
            return 1.0
        survivals = [sibling_survival(known[one.group] - _share(one)) for one in running]
        probes = [one.probe for one in running]
        costs = self._coordinator.worker(view.session.session_id).terms.profile.costs
        context = sum(one.context for one in running)
        return speculation_gain(costs, survivals, probes, context, self._verification)


def speculation_gain(
    costs: StepCosts,
    survivals: Sequence[Sequence[float]],
    probes: Sequence[bool],
    context: int,
    verification: float = 1.0,
) -> float:
    """Tokens in a second over those without drafts. `context`: of all samples, tokens; `verification`: cost of draft
    tokens, as a multiple of `costs`.
    """
    batch = len(survivals)
    plain_s = costs.step_s(batch=batch, context=context)

    def seconds(tokens: int) -> float:
        drafts = tokens - batch
        pairs = drafts * context // batch
        looked_up_s = _LOOK_UP_S * batch if drafts else 0.0
        with_drafts_s = costs.step_s(batch=batch, context=context, prefill=drafts, pairs=pairs)
        return plain_s + verification * (with_drafts_s - plain_s) + looked_up_s

    lengths = printed_drafts(survivals, probes, seconds)
    made = sum(1.0 + sum(one[:length]) for one, length in zip(survivals, lengths, strict=True))
    return made / batch * plain_s / seconds(batch + sum(lengths))


def _share(one: StepMember) -> float:
    return 1.0 if one.ended else one.made / one.length
