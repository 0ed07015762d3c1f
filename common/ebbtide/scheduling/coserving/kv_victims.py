"""Which requests give up their keys and values when memory has to be given back.

They lose no token: they wait, and their keys and values are computed again when there is room. So a cut costs what that
computation costs, and this chooses the requests for which it is least. Prefill costs a linear part for each token and
a quadratic one for attention to all tokens before it. Blocks that others share are neither freed nor computed again. A
request that is about to finish gives its memory back by itself: what it would free counts for the rest of its life
only.
"""

from collections.abc import Sequence
from typing import Final

from msgspec import Struct

#: Attention to as many tokens of context costs as much as all else that a token costs; about 6 times the width of a
#: transformer's layers. It makes long contexts dearer, and its exact size matters little.
_CONTEXT: Final = 8192
#: Memory is looked for for so many steps; what would be free by then anyway is worth little.
_HORIZON: Final = 64


class HeldRequest(Struct, frozen=True, kw_only=True):
    """What a running request holds. `computed`: tokens whose keys and values are there, of which the first `shared` lie
    in blocks that stay (others use them); `blocks`: those that are free without it; `remaining`: tokens still to
    come, at most."""

    request: str
    computed: int
    blocks: int
    shared: int = 0
    remaining: int = _HORIZON


def recompute_cost(computed: int, shared: int = 0, *, context: int = _CONTEXT) -> float:
    """The work of computing tokens `shared` to `computed` again, in tokens without context."""
    return (computed - shared) + (computed**2 - shared**2) / (2 * context)


def choose_victims(held: Sequence[HeldRequest], blocks: int, *, context: int = _CONTEXT) -> list[str]:
    """Requests that free `blocks` together, at the least cost that is found; all that free something, if they do not.

    The cheapest per block first, as long as needed; instead of the last ones, a single one that does as well for less
    (the usual better bound of the greedy cover). None of them could be left out.
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
    """Blocks that it frees, less if it would free them soon by itself."""
    return item.blocks * min(1.0, max(1, item.remaining) / _HORIZON)


def _loss(item: HeldRequest, costs: dict[str, float]) -> float:
    """Its cost, more if it is about to finish."""
    return costs[item.request] * item.blocks / _worth(item)


def _needed(items: list[HeldRequest], blocks: int, costs: dict[str, float]) -> list[HeldRequest]:
    """`items` without those that are not needed, the dearest left out first."""
    kept = list(items)
    for item in sorted(items, key=lambda one: -_loss(one, costs)):
        if sum(one.blocks for one in kept) - item.blocks >= blocks:
            kept.remove(item)
    return kept
