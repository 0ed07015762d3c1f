"""Says how many tokens a member of a step is expected to make yet: by forecasts from its group, or as oracles know."""

from collections.abc import Iterable, Sequence
from typing import Final, Protocol

from ebbtide.scheduling.long_tail.length_learner import EndedGroup, LengthLearner, UnfinishedGroup
from ebbtide.simulator.rivals.tail.step_members import StepMember, StepMembers

#: A group is asked about again once its longest member has grown by this factor, or a member ended.
_GROWN: Final = 1.4
#: What a forecast leaves of a rest, at least, however far its sample has come since.
_LEAST: Final = 0.1


class RestForecast(Protocol):
    """Knows or learns lengths. Tokens."""

    def look(self, members: StepMembers) -> None:
        """Take in what a round sees."""
        ...

    def rest(self, one: StepMember) -> float:
        """Tokens to come."""
        ...


class TrueRests:
    """Knows all lengths."""

    def look(self, members: StepMembers) -> None: ...

    def rest(self, one: StepMember) -> float:
        return float(one.length - one.made)


class NoRests:
    """Knows nothing: all are equal."""

    def look(self, members: StepMembers) -> None: ...

    def rest(self, one: StepMember) -> float:
        return float(one.cap - one.made)


class LearntRests:
    """Asks the run's `LengthLearner`. Between two forecasts of a group, a rest falls by what was made.

    Invariant: `_rests` has what was forecast of each open member, and the tokens that it had made then.
    """

    def __init__(self, former: Iterable[Sequence[int]], cap: int | None = None) -> None:
        """`former`: lengths of the groups of steps before; those at the `cap` did not end by themselves."""
        self._learner = LengthLearner()
        groups = [ended_group(one, cap) for one in former]
        if groups:
            self._learner.groups_ended(groups)
        self._rests: dict[str, tuple[float, int]] = {}
        self._asked: dict[int, tuple[int, int]] = {}  # by group: members that had ended, and the most made
        self._step: dict[int, list[StepMember]] = {}  # groups of the step under way

    def look(self, members: StepMembers) -> None:
        if self._step and not (members.groups.keys() & self._step.keys()):
            ended = (([one.length for one in some], some[0].cap) for some in self._step.values())
            self._learner.groups_ended([ended_group(lengths, cap) for lengths, cap in ended])
            self._step, self._rests, self._asked = {}, {}, {}
        for group, some in members.groups.items():
            self._step.setdefault(group, some)
        due = [some for some in members.groups.values() if self._is_due(some)]
        if due and not self._learner.known:
            self._learner.groups_open(map(unfinished_group, members.groups.values()))
        for some in due:
            self._foresee(some)

    def rest(self, one: StepMember) -> float:
        rest, made = self._rests[one.rollout_id]
        return min(float(one.cap - one.made), max(rest - (one.made - made), _LEAST * rest, 1.0))

    def _is_due(self, some: Sequence[StepMember]) -> bool:
        asked = self._asked.get(some[0].group)
        if asked is None:
            return True
        ended, most = asked
        return sum(one.ended for one in some) > ended or max(one.made for one in some) > max(_GROWN * most, most + 64)

    def _foresee(self, some: Sequence[StepMember]) -> None:
        self._asked[some[0].group] = sum(one.ended for one in some), max(one.made for one in some)
        forecast = self._learner.forecast(unfinished_group(some))
        rests: dict[int, float] = {}
        for one in some:
            if not one.ended:
                if one.made not in rests:
                    rests[one.made] = forecast.rest(one.made)
                self._rests[one.rollout_id] = rests[one.made], one.made


def ended_group(lengths: Sequence[int], cap: int | None) -> EndedGroup:
    """What a whole group teaches."""
    if cap is None:
        return EndedGroup(lengths=lengths)
    return EndedGroup(lengths=[one for one in lengths if one < cap], stopped=[one for one in lengths if one >= cap])


def unfinished_group(some: Sequence[StepMember]) -> UnfinishedGroup:
    """What is known of an open group."""
    cap = some[0].cap
    return UnfinishedGroup(
        finished=[one.length for one in some if one.ended and one.length < cap],
        stopped=[one.length for one in some if one.ended and one.length >= cap],
        made=[one.made for one in some if not one.ended],
        cap=cap,
    )
