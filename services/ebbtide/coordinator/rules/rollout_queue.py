"""Orders the queued rollouts of one run: by priority, then by the place of the group, then by their own place.

So a re-queued rollout returns to its place, and what a started group still lacks (later turns, retries) comes before
later groups: groups are completed in order, and none starves. A run may rank its training rollouts by forecasts of
lengths: then their rank counts before the place of the group (`forecasts/start_ranks.py`).

Evaluation has a queue of its own, and so have requests of gateways' clients. Requests take turns with all other
rollouts, and evaluation with training in the turns that are left, both by start-time fair queueing (Goyal, Vin and
Cheng, SIGCOMM 1996) with the parts of `PARTS`: none blocks another. Among requests the interactive ones go first, then
those of a lower priority, then the older ones.

Invariant: each list of `_orders` holds the sorted keys of its kind's members of `_waiting`, by `_ranks`, and `_bounds`
counts their bounds. Mirrors the store: lost with the process, and read back at its start.
"""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from enum import IntEnum
from typing import Final, TypeAlias

from msgspec import Struct

from ebbtide.step_pacing import VersionBounds
from ebbtide.types.run import SlotPriority

#: Lower ones are next, among rollouts of one kind and priority.
Rank: TypeAlias = tuple[int, ...]
_Key: TypeAlias = tuple[int, int, Rank, int, int, str]
_UNRANKED: Final[Rank] = ()
#: Part of the placements while others wait too: evaluation's among the run's own rollouts by `EvaluationSpec.priority`,
#: that of requests among all by `RequestSpec.priority`.
PARTS: Final = {SlotPriority.BEFORE: 0.75, SlotPriority.SHARED: 0.5, SlotPriority.BACKGROUND: 0.125}
#: So many members are moved one by one: in a long queue, to copy it takes as long.
_FEW: Final = 64


class QueuedRollout(Struct, frozen=True, kw_only=True, gc=False):  # in no cycle: the collector need not look at it
    rollout_id: str
    episode_id: str
    bounds: VersionBounds
    length: int  # tokens of prompt and partial response
    place: int
    priority: int = 0
    since: float = 0.0  # when it was queued
    avoid: frozenset[str] = frozenset()  # names of workers that fell silent with it
    no_progress: int = 0  # attempts in a row that ended without a new token
    prefer: str = ""  # the worker that a move chose for it
    made: int = 0  # of `length`, tokens of the response
    budget: int = 0  # tokens that it may still make; 0: not known
    group: int = 0  # the place of the first of its group
    evaluation: bool = False  # not trained on
    request: bool = False  # of a gateway's client
    interactive: bool = False  # somebody waits for each token
    step: int = 0  # that it was submitted for, if known
    turn: int = 0  # of its episode
    prompt: str = ""  # of the first of its group: a digest of the prompt's tokens
    min_p: bool = False  # it is sampled with `min_p`, which not all engines do
    score_records: int = 0  # of its prompt, which is read whole then: no prefix cache helps; 0: it is not scored

    @property
    def scores(self) -> bool:
        """Whether its prompt is scored."""
        return self.score_records > 0


class _Kind(IntEnum):
    """The kinds that have queues. The first two are sides of their turns."""

    TRAINING = 0
    EVALUATION = 1
    REQUEST = 2


class _Turns:
    """Turns of two sides: of the first, and of the second, which has `part` of the places while both wait."""

    def __init__(self, part: float) -> None:
        self._strides = 1.0 / (1.0 - part), 1.0 / part
        self.passed = [0.0, 0.0]  # virtual time of each side; the one with the lower is next

    def begin(self, side: int, *, other_waits: bool) -> None:
        """Note that a side has something again: its idle time earned no turns."""
        self.passed[side] = max(self.passed[side], self.passed[not side] if other_waits else 0.0)

    def take(self, side: int, *, other_waits: bool) -> None:
        """Note that a side had a place."""
        if other_waits:
            self.passed[side] += self._strides[side]

    def merged(self, first: Iterator[_Key], second: Iterator[_Key]) -> Iterator[_Key]:
        """What both sides have, as they will have their turns."""
        heads, sides, passed = [next(first, None), next(second, None)], (first, second), list(self.passed)
        tie = self._strides[1] <= self._strides[0]  # the larger part first
        while heads[0] is not None or heads[1] is not None:
            second_next = passed[1] < passed[0] or (passed[1] == passed[0] and tie)
            side = 1 if heads[0] is None or (heads[1] is not None and second_next) else 0
            if (head := heads[side]) is not None:
                yield head
            heads[side] = next(sides[side], None)
            passed[side] += self._strides[side]


class RolloutQueue:
    def __init__(
        self, evaluation: SlotPriority = SlotPriority.BEFORE, requests: SlotPriority = SlotPriority.BEFORE
    ) -> None:
        """`evaluation`, `requests`: see `EvaluationSpec.priority` and `RequestSpec.priority`."""
        self._orders: dict[_Kind, list[_Key]] = {kind: [] for kind in _Kind}
        self._own_turns = _Turns(PARTS[evaluation])  # training, evaluation
        self._turns = _Turns(PARTS[requests])  # both of these, requests
        self._waiting: dict[str, QueuedRollout] = {}
        self._ranks: dict[str, Rank] = {}  # of those of `_waiting` that are ranked
        self._bounds: Counter[VersionBounds] = Counter()
        self._longest = 0  # no member is longer
        self._scoring: dict[str, QueuedRollout] = {}  # those of `_waiting` whose prompts are scored

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, rollout_id: str) -> bool:
        return rollout_id in self._waiting

    def __iter__(self) -> Iterator[QueuedRollout]:
        return (self._waiting[key[-1]] for key in self._in_turns())

    def get(self, rollout_id: str) -> QueuedRollout | None:
        return self._waiting.get(rollout_id)

    def add(self, one: QueuedRollout, rank: Rank = _UNRANKED) -> None:
        """Queue `one`, replacing a member with the same id."""
        self.remove(one.rollout_id)
        if rank:
            self._ranks[one.rollout_id] = rank
        kind = _kind(one)
        if not self._orders[kind]:
            self._begin(kind)
        self._waiting[one.rollout_id] = one
        self._bounds[one.bounds] += 1
        self._longest = max(self._longest, one.length)
        if one.scores:
            self._scoring[one.rollout_id] = one
        insort(self._orders[kind], self._key(one))

    def rerank(self, rollout_id: str, rank: Rank) -> None:
        """Give a member another rank. Does nothing for others."""
        one = self._waiting.get(rollout_id)
        if one is None or self._ranks.get(rollout_id, _UNRANKED) == rank:
            return
        order = self._orders[_kind(one)]
        del order[bisect_left(order, self._key(one))]
        self._ranks[rollout_id] = rank
        insort(order, self._key(one))

    def rerank_all(self, ranks: Mapping[str, Rank]) -> None:
        """Give members that are trained on other ranks. Many are moved at once: each alone moves half of the queue."""
        changed = [
            one
            for name, rank in ranks.items()
            if (one := self._waiting.get(name)) is not None and self._ranks.get(name, _UNRANKED) != rank
        ]
        if len(changed) <= _FEW:
            for one in changed:
                self.rerank(one.rollout_id, ranks[one.rollout_id])
            return
        order = self._orders[_Kind.TRAINING]
        places = sorted(bisect_left(order, self._key(one)) for one in changed)
        others, at = list[_Key](), 0
        for place in places:
            others += order[at:place]
            at = place + 1
        others += order[at:]
        self._ranks.update((one.rollout_id, ranks[one.rollout_id]) for one in changed)
        order.clear()
        at = 0
        for key in sorted(map(self._key, changed)):
            place = bisect_left(others, key, at)
            order += others[at:place]
            order.append(key)
            at = place
        order += others[at:]

    def replace(self, other: "RolloutQueue") -> None:
        """Take over the members of another queue, which must not be used again, instead of these. Turns stay."""
        turns = self._turns, self._own_turns
        vars(self).update(vars(other))
        self._turns, self._own_turns = turns

    def take(self, rollout_id: str) -> QueuedRollout | None:
        """Remove a rollout that was placed: its kind has had a turn."""
        one = self.remove(rollout_id)
        if one is not None:
            kind = _kind(one)
            if kind is not _Kind.REQUEST:
                self._own_turns.take(kind, other_waits=bool(self._orders[_other(kind)]))
            request = kind is _Kind.REQUEST
            self._turns.take(request, other_waits=self._waits(request=not request))
        return one

    def remove(self, rollout_id: str) -> QueuedRollout | None:
        """Remove a rollout; None if it is not queued."""
        one = self._waiting.pop(rollout_id, None)
        if one is not None:
            self._scoring.pop(rollout_id, None)
            order = self._orders[_kind(one)]
            del order[bisect_left(order, self._key(one))]
            self._ranks.pop(rollout_id, None)
            self._bounds[one.bounds] -= 1
            if not self._bounds[one.bounds]:
                del self._bounds[one.bounds]
        return one

    def interactive(self) -> Iterator[QueuedRollout]:
        """The interactive members, in their order."""
        for key in self._orders[_Kind.REQUEST]:
            one = self._waiting[key[-1]]
            if not one.interactive:
                return
            yield one

    def training(self) -> Iterator[QueuedRollout]:
        """Those to be trained on, in their order. Members that leave meanwhile are left out, new ones too."""
        for key in list(self._orders[_Kind.TRAINING]):
            if (one := self._waiting.get(key[-1])) is not None:
                yield one

    def bounds(self) -> set[VersionBounds]:
        """The distinct version bounds in the queue."""
        return set(self._bounds)

    def scoring(self) -> Collection[QueuedRollout]:
        """The members whose prompts are scored."""
        return self._scoring.values()

    def not_shorter(self, tokens: int) -> list[QueuedRollout]:
        """The members of at least so many tokens; at once if there cannot be any."""
        if self._longest < tokens:
            return []
        self._longest = max((one.length for one in self._waiting.values()), default=0)
        return [one for one in self if one.length >= tokens] if self._longest >= tokens else []

    def _begin(self, kind: _Kind) -> None:
        """Note that a kind of which none waited has a member again."""
        request = kind is _Kind.REQUEST
        if not self._waits(request=request):
            self._turns.begin(request, other_waits=self._waits(request=not request))
        if not request:
            self._own_turns.begin(kind, other_waits=bool(self._orders[_other(kind)]))

    def _key(self, one: QueuedRollout) -> _Key:
        patient = int(one.request and not one.interactive)
        rank = self._ranks.get(one.rollout_id, _UNRANKED)
        return patient, one.priority, rank, one.group, one.place, one.rollout_id

    def _waits(self, *, request: bool) -> bool:
        if request:
            return bool(self._orders[_Kind.REQUEST])
        return bool(self._orders[_Kind.TRAINING] or self._orders[_Kind.EVALUATION])

    def _in_turns(self) -> Iterator[_Key]:
        training, evaluation, requests = (self._orders[kind] for kind in _Kind)
        own: Iterable[_Key] = training or evaluation
        if training and evaluation:
            own = self._own_turns.merged(iter(training), iter(evaluation))
        if not requests:
            return iter(own)
        return self._turns.merged(iter(own), iter(requests)) if self._waits(request=False) else iter(requests)


def unscored(queue: Iterable[QueuedRollout], scorerless: float, *, now: float, grace_s: float) -> list[QueuedRollout]:
    """Rollouts that waited to be scored for `grace_s` while no worker could. `scorerless`: since when none can."""
    return [one for one in queue if one.scores and now - max(one.since, scorerless) >= grace_s]


def _kind(one: QueuedRollout) -> _Kind:
    if one.request:
        return _Kind.REQUEST
    return _Kind.EVALUATION if one.evaluation else _Kind.TRAINING


def _other(kind: _Kind) -> _Kind:
    return _Kind.TRAINING if kind is _Kind.EVALUATION else _Kind.EVALUATION


#: Groups that are remembered.
_GROUPS: Final = 1 << 16


class GroupPlaces:
    """Remembers the place in the queue that each group has: that of its first rollout.

    So rollouts that come later, such as an episode's next turn, wait where their group does.

    Invariant: a group is known from its first rollout on, until nothing of it is open; of too many, those that were
    asked for last. Lost with the process: a group then has the place of its first rollout that is still open.
    """

    def __init__(self, memory: int = _GROUPS) -> None:
        self._memory = memory
        self._places: dict[str, int] = {}  # by group
        self._groups: dict[int, str] = {}  # by place

    def of(self, group_id: str, place: int) -> int:
        """The group's place: `place`, if this is its first rollout."""
        found = self._places[group_id] = self._places.pop(group_id, place)
        self._groups[found] = group_id
        if len(self._places) > self._memory:
            self.forget(next(iter(self._places.values())))
        return found

    def forget(self, place: int) -> None:
        """Note that nothing of the group at this place is open."""
        group_id = self._groups.pop(place, None)
        if group_id is not None:
            del self._places[group_id]
