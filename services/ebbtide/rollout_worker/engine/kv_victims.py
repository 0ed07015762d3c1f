"""Chooses the requests to preempt when an engine must give back memory of its KV cache.

A preempted request loses no token: it waits, and is prefilled again when there is room. So this chooses the requests
for which that costs least. Prefill costs a linear part for each token, and a quadratic part for
attention to earlier tokens. Blocks shared with others are neither freed nor computed again. A request that will finish
soon frees its memory by itself, so its blocks count only for its remaining tokens.
"""

from collections.abc import Sequence
from typing import Final

from msgspec import Struct

#: The context length at which attention costs as much as the rest of a token's work: about 6 times the width of a
#: transformer's layers. It makes long contexts more expensive; its exact size matters little.
_CONTEXT: Final = 8192
#: Memory is needed for this many steps; blocks that become free sooner are worth less.
_HORIZON: Final = 64


class HeldRequest(Struct, frozen=True, kw_only=True):
    """What a running request holds of the KV cache."""

    request: str
    computed: int  # tokens in the KV cache
    blocks: int  # that are free without it
    shared: int = 0  # of `computed`, the first tokens, whose blocks other requests use too
    remaining: int = _HORIZON  # tokens still to come, at most


def recompute_cost(computed: int, shared: int = 0, *, context: int = _CONTEXT) -> float:
    """The work to compute tokens `shared` to `computed` again, in tokens without context."""
    return (computed - shared) + (computed**2 - shared**2) / (2 * context)


def choose_victims(held: Sequence[HeldRequest], blocks: int, *, context: int = _CONTEXT) -> list[str]:
    """Requests that together free `blocks` at a low cost; if they cannot, all that free something.

    Greedy cover: the cheapest per block come first. Each prefix is also completed with a single request, and the
    cheapest combination wins. None of its requests can be left out.
    """
    useful = [item for item in held if item.blocks > 0]
    if blocks <= 0:
        return []
    costs = {item.request: recompute_cost(item.computed, item.shared, context=context) for item in useful}
    useful.sort(key=lambda item: (costs[item.request] / _worth(item), item.request))
    if sum(item.blocks for item in useful) <= blocks:
        return [item.request for item in useful]
    best: list[HeldRequest] = []
    least = float("inf")
    taken: list[HeldRequest] = []
    freed = 0
    for index, item in enumerate(useful):
        enough = [other for other in useful[index:] if freed + other.blocks >= blocks]
        last = min(enough, key=lambda other: _loss(other, costs), default=None)
        if last is not None:
            found = _needed([*taken, last], blocks, costs)
            loss = sum(_loss(one, costs) for one in found)
            if loss < least:
                best, least = found, loss
        if freed >= blocks:
            break
        taken.append(item)
        freed += item.blocks
    return [item.request for item in best]


def _worth(item: HeldRequest) -> float:
    """The blocks that it frees; they count less if it will finish soon."""
    return item.blocks * min(1.0, max(1, item.remaining) / _HORIZON)


def _loss(item: HeldRequest, costs: dict[str, float]) -> float:
    """Its cost, which is higher if it will finish soon."""
    return costs[item.request] * item.blocks / _worth(item)


def _needed(items: list[HeldRequest], blocks: int, costs: dict[str, float]) -> list[HeldRequest]:
    """`items` without those that are not needed; the most expensive are left out first."""
    kept = list(items)
    for item in sorted(items, key=lambda one: -_loss(one, costs)):
        if sum(one.blocks for one in kept) - item.blocks >= blocks:
            kept.remove(item)
    return kept
