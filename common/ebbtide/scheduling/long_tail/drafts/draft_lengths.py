"""Decides how many draft tokens each running sample gets in an engine's steps.

A draft token of a sample gains one token with the probability that it and all before it are accepted (its survival).
Tokens of samples that decide when the step ends are worth more. Survival never rises along a draft, so the tokens with
the greatest worth times survival, taken one by one, are the best choice for their number: no other choice of as many
gains more. The number follows from the learnt cost of verification: as many as make the worth of a step's tokens by its
time the greatest. If that is none, the engine does not speculate.

Seer's rule (arXiv 2511.14617, MBA in the section on grouped speculative decoding) compares totals of two classes, so
the smaller class gets less than its tokens are worth; it also leaves part of the budget unused.
"""

from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heapreplace
from typing import NamedTuple

from msgspec import Struct


class DraftSlot(Struct, frozen=True, gc=False):
    """A running sample. `survival`: see `DraftAcceptance.survival`; its length is the longest draft. `worth`: of each
    of its tokens, above 0.
    """

    survival: Sequence[float]
    worth: float = 1.0


class DraftPlan(NamedTuple):
    """Lengths of drafts, in the slots' order; the worth of a step's tokens, and the step's time in seconds."""

    lengths: Sequence[int]
    worth: float
    step_s: float


def drafts_within(slots: Sequence[DraftSlot], budget: int) -> list[int]:
    """The lengths that gain the most with at most `budget` draft tokens in all."""
    lengths = [0] * len(slots)
    for slot, _ in _by_gain(slots, budget):
        lengths[slot] += 1
    return lengths


def best_drafts(slots: Sequence[DraftSlot], seconds: Callable[[int], float], *, most: int) -> DraftPlan:
    """The lengths that make the most worth in a second. `seconds`: a step's time by the tokens that it verifies, one of
    each slot included. `most`: draft tokens that the engine takes.
    """
    worth = sum(slot.worth for slot in slots)
    best_worth, best_s, best = worth, seconds(len(slots)), 0
    order = list[int]()
    for count, (slot, gain) in enumerate(_by_gain(slots, most), 1):
        order.append(slot)
        worth += gain
        step_s = seconds(len(slots) + count)
        if worth * best_s > best_worth * step_s:
            best_worth, best_s, best = worth, step_s, count
    lengths = [0] * len(slots)
    for slot in order[:best]:
        lengths[slot] += 1
    return DraftPlan(lengths, best_worth, best_s)


def expected_worth(slots: Sequence[DraftSlot], lengths: Sequence[int]) -> float:
    """The worth of a step's tokens with drafts of these lengths."""
    return sum(slot.worth * (1.0 + sum(slot.survival[:length])) for slot, length in zip(slots, lengths, strict=True))


def _by_gain(slots: Sequence[DraftSlot], most: int) -> list[tuple[int, float]]:
    """Slots that get one draft token after another, with the gain of each token, the greatest first."""
    heap = [(-slot.worth * slot.survival[0], at, 0) for at, slot in enumerate(slots) if slot.survival]
    heapify(heap)
    taken = list[tuple[int, float]]()
    while heap and len(taken) < most:
        loss, at, length = heap[0]
        if loss >= 0.0:
            break
        taken.append((at, -loss))
        slot, following = slots[at], length + 1
        if following < len(slot.survival):
            # A survival that rose would be a mistake of its learner: the order must stay one of falling gains.
            gain = min(slot.worth * slot.survival[following], -loss)
            heapreplace(heap, (-gain, at, following))
        else:
            heappop(heap)
    return taken
