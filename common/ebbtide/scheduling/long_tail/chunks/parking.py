"""Decides whether a rollout that gave up its memory waits at its engine or goes back to the queue.

Where it waits, its keys and values may still be cached when it goes on. Elsewhere it is read again, but it may start at
once. So it leaves if its wait would last much longer than the reading.
"""

from collections.abc import Sequence
from math import inf
from typing import Final

from ebbtide.scheduling.long_tail.chunks.kv_book import KvBook
from ebbtide.scheduling.long_tail.chunks.kv_contexts import ChunkRules, KvContext

#: The wait must be so many times the reading: whether another engine has room is not known here.
_SURELY: Final = 2.0
#: A hand-over and a placement take less than this.
_HAND_OVER_S: Final = 1.0


def wait_tokens(one: KvContext, running: Sequence[KvContext], rules: ChunkRules) -> float:
    """Tokens that each running rollout probably makes until there is room for `one`; inf if there will be none."""
    book = KvBook(rules)
    for other in running:
        book.reserve(other, other.reserved)
    wanted = one.tokens + min(one.most, rules.longest_chunk)
    if book.needed(one, wanted) <= book.free:
        return 0.0
    for other in sorted(running, key=rules.likely_rest):
        book.release(other)
        if book.needed(one, wanted) <= book.free:
            return rules.likely_rest(other)
    return inf


def leaves(wait_s: float, read_s: float) -> bool:
    """Whether a parked rollout goes back to the queue. `read_s`: to read it again elsewhere."""
    return wait_s > _HAND_OVER_S + _SURELY * read_s
