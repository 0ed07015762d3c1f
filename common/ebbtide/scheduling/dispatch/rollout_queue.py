"""Orders the queued rollouts of one run: by priority, then by the place of the group, then by their own place. So a
re-queued rollout returns to its place, and what a started group still lacks (later turns, retries) comes before later
groups: groups are completed in order, and none starves.

Evaluation has a queue of its own. While both wait, the two take turns by start-time fair queueing (Goyal, Vin and
Cheng, SIGCOMM 1996) with the parts of `EVALUATION_PART`: neither blocks the other.

Invariant: each `_Queue` holds the sorted keys of its kind's members of `_waiting`, and `_bounds` counts their bounds.
Mirrors the store: lost with the process, and read back at its start.
"""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterator
from typing import Final, TypeAlias

from msgspec import Struct

from ebbtide.scheduling.steps.step_pacing import VersionBounds

_Key: TypeAlias = tuple[int, int, int, str]
#: Evaluation's part of the placements while training waits too, by `EvaluationSpec.priority`.
EVALUATION_PART: Final = {"before": 0.75, "beside": 0.5, "behind": 0.125}


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


class _Queue:
    """One kind of rollouts."""

    def __init__(self, part: float) -> None:
        self.order: list[_Key] = []
        self.stride = 1.0 / part
        self.passed = 0.0  # virtual time; the queue with the lower one is next


class RolloutQueue:
    def __init__(self, evaluation: str = "before") -> None:
        """`evaluation`: see `EvaluationSpec.priority`."""
        part = EVALUATION_PART[evaluation]
        self._training, self._evaluation = _Queue(1.0 - part), _Queue(part)
        self._waiting: dict[str, QueuedRollout] = {}
        self._bounds: Counter[VersionBounds] = Counter()
        self._longest = 0  # no member is longer

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, rollout_id: str) -> bool:
        return rollout_id in self._waiting

    def __iter__(self) -> Iterator[QueuedRollout]:
        if not self._evaluation.order:
            return (self._waiting[key[-1]] for key in self._training.order)
        return self._in_turns()

    def add(self, one: QueuedRollout) -> None:
        """Queue `one`, replacing a member with the same id."""
        self.remove(one.rollout_id)
        queue, other = self._queues(one)
        if not queue.order:  # idle time earns no turns
            queue.passed = max(queue.passed, other.passed if other.order else 0.0)
        self._waiting[one.rollout_id] = one
        self._bounds[one.bounds] += 1
        self._longest = max(self._longest, one.length)
        insort(queue.order, _key(one))

    def replace(self, other: "RolloutQueue") -> None:
        """Take over the members of another queue, which must not be used again, instead of these. Turns stay."""
        passed = self._training.passed, self._evaluation.passed
        vars(self).update(vars(other))
        self._training.passed, self._evaluation.passed = passed

    def take(self, rollout_id: str) -> QueuedRollout | None:
        """Remove a rollout that was placed: its kind has had a turn."""
        one = self.remove(rollout_id)
        if one is not None:
            queue, other = self._queues(one)
            if other.order:
                queue.passed += queue.stride
        return one

    def remove(self, rollout_id: str) -> QueuedRollout | None:
        """Remove a rollout; None if it is not queued."""
        one = self._waiting.pop(rollout_id, None)
        if one is not None:
            order = self._queues(one)[0].order
            del order[bisect_left(order, _key(one))]
            self._bounds[one.bounds] -= 1
            if not self._bounds[one.bounds]:
                del self._bounds[one.bounds]
        return one

    def bounds(self) -> set[VersionBounds]:
        """The distinct version bounds in the queue."""
        return set(self._bounds)

    def not_shorter(self, tokens: int) -> list[QueuedRollout]:
        """The members of at least so many tokens; at once if there cannot be any."""
        if self._longest < tokens:
            return []
        self._longest = max((one.length for one in self._waiting.values()), default=0)
        return [one for one in self if one.length >= tokens] if self._longest >= tokens else []

    def _queues(self, one: QueuedRollout) -> tuple[_Queue, _Queue]:
        """The queue of its kind, and the other."""
        queues = (self._training, self._evaluation)
        return queues[one.evaluation], queues[not one.evaluation]

    def _in_turns(self) -> Iterator[QueuedRollout]:
        training, evaluation = self._training, self._evaluation
        at = {id(training): 0, id(evaluation): 0}
        passed = {id(training): training.passed, id(evaluation): evaluation.passed}
        first = sorted((evaluation, training), key=lambda one: one.stride)  # ties: the larger part first
        while open_ := [queue for queue in first if at[id(queue)] < len(queue.order)]:
            queue = min(open_, key=lambda one: passed[id(one)])
            yield self._waiting[queue.order[at[id(queue)]][-1]]
            at[id(queue)] += 1
            passed[id(queue)] += queue.stride


def _key(one: QueuedRollout) -> _Key:
    return one.priority, one.group, one.place, one.rollout_id
