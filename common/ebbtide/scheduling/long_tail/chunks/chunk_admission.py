"""Decides which rollouts an engine runs, so that it never lacks memory for keys and values by itself.

A rollout runs within a reservation: memory up to its next chunk's end. It gets the next chunk before it needs it. If
there is none, others give up theirs and wait: those that are cheapest to read again. One that waits starts if its first
chunk is free and if the forecast says that all fit until they end. Where the first one does not fit, later ones may.
They must end before there is room for the first one, as in EASY backfilling (Lifka, JSSPP 1995): else long rollouts
would start last, and a step would wait for them. Seer admits by chunks, too (arXiv 2511.14617, section 2.1 of its
design), but by one size for all, and nobody passes the first one that does not fit.

Nobody waits for ever. Rollouts that came longer ago than the patience go first, and nobody passes them. They keep
their memory while others can give theirs up, and the one that came first of all always does. So a rollout starts at the
latest when all that ran when its patience ended, and all that came before it, have ended.
"""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from math import inf
from typing import Final

from msgspec import Struct

from ebbtide.scheduling.long_tail.chunks.kv_book import KvBook
from ebbtide.scheduling.long_tail.chunks.kv_contexts import ChunkRules, KvContext

#: Chunks shrink once less than this share of the memory is free, to at least a quarter.
_PRESSED: Final = 0.25
_SMALLEST: Final = 0.25
#: So many waiting rollouts are looked at behind one that does not fit.
_LOOKED_AT: Final = 32


class ChunkDecision(Struct, frozen=True):
    """What changes now, in this order."""

    parked: tuple[str, ...] = ()  # give up their memory and wait
    grown: tuple[tuple[str, int], ...] = ()  # run on, up to the context named
    started: tuple[tuple[str, int], ...] = ()  # begin to run, up to the context named


def is_due(context: KvContext, rules: ChunkRules) -> bool:
    """Whether a running rollout needs its next chunk now."""
    return context.tokens + rules.lead >= context.reserved < context.tokens + context.most


def divide_memory(
    running: Sequence[KvContext], waiting: Sequence[KvContext], rules: ChunkRules, now_s: float
) -> ChunkDecision:
    """Decide for one engine. `waiting`: in the order in which they should start.

    The reservations afterwards fit the memory, unless a single rollout is longer than all of it.
    """
    return _Division(running, rules, now_s).decide(waiting)


class _Division:
    """One decision. Invariant: `_running` has those that keep their memory, and `_book` their reservations."""

    def __init__(self, running: Sequence[KvContext], rules: ChunkRules, now_s: float) -> None:
        self._rules, self._overdue_s = rules, now_s - rules.patience_s
        self._running = {one.key: one for one in sorted(running, key=_by_age)}
        self._book = KvBook(rules)
        for one in running:
            self._book.reserve(one, one.reserved)
        self._parked: list[str] = []
        self._grown: dict[str, int] = {}
        self._started: list[tuple[str, int]] = []
        self._ways_out: tuple[list[int], list[float]] | None = None  # of `_running`, for `_room_in`

    def decide(self, waiting: Sequence[KvContext]) -> ChunkDecision:
        self._make_room(0)  # the memory may be smaller than it was
        for one in [one for one in self._running.values() if is_due(one, self._rules)]:
            if one.key in self._running:
                self._grow(one)
        if not self._parked:
            self._start(waiting)
        grown = tuple(item for item in self._grown.items() if item[0] in self._running)
        return ChunkDecision(tuple(self._parked), grown, tuple(self._started))

    def _chunk(self, one: KvContext) -> int:
        """Tokens of its next chunk, by what it probably needs and by what is free."""
        rules = self._rules
        free = max(0, self._book.free) / max(1, rules.blocks)
        size = rules.longest_chunk * min(1.0, max(_SMALLEST, free / _PRESSED))
        wanted = one.longest_rest if one.longest_rest is not None else size
        return min(one.most, max(self._least(one), round(min(size, wanted))))

    def _least(self, one: KvContext) -> int:
        """Tokens of the smallest chunk: it lasts until the decision after the next."""
        return min(one.most, 2 * self._rules.lead)

    def _grow(self, one: KvContext) -> None:
        reserved = one.tokens + self._chunk(one)
        if self._book.needed(one, reserved) > self._book.free:
            reserved = one.tokens + self._least(one)
            self._make_room(self._book.needed(one, reserved))
        if one.key in self._running:
            self._book.reserve(one, max(one.reserved, reserved))
            self._grown[one.key] = max(one.reserved, reserved)

    def _make_room(self, blocks: int) -> None:
        """Have others park until so many blocks are free, or one runs alone."""
        while self._book.free < blocks and len(self._running) > 1:
            victim = self._victim(blocks - self._book.free)
            self._book.release(victim)
            del self._running[victim.key]
            self._parked.append(victim.key)

    def _victim(self, lack: int) -> KvContext:
        """The cheapest to read again that frees enough; if none does, the cheapest. Of equal ones, that which would end
        last."""
        others = list(self._running.values())[1:]
        young = [one for one in others if one.since_s >= self._overdue_s] or others
        enough = [one for one in young if self._book.freed(one) >= lack] or young
        return min(enough, key=lambda one: (self._unshared(one), -self._rules.likely_rest(one), one.key))

    def _unshared(self, one: KvContext) -> int:
        return one.tokens - self._rules.block * self._rules.shared_blocks(one)

    def _start(self, waiting: Sequence[KvContext]) -> None:
        overdue = sorted((one for one in waiting if one.since_s < self._overdue_s), key=_by_age)
        late = {one.key for one in overdue}
        passed, within = 0, inf  # tokens within which one that passes the first one must end
        for one in (*overdue, *(one for one in waiting if one.key not in late)):
            if len(self._running) >= self._rules.slots or passed > _LOOKED_AT:
                return
            reserved = one.tokens + self._chunk(one)
            if not self._running or (self._ends(one) <= within and self._fits(one, reserved)):
                self._book.reserve(one, reserved)
                self._running[one.key] = one
                self._ways_out = None
                self._started.append((one.key, reserved))
            elif one.key in late:
                return
            else:
                passed += 1
                within = min(within, self._room_in(one))

    def _ends(self, one: KvContext) -> float:
        return one.longest_rest if one.longest_rest is not None else self._rules.likely_rest(one)

    def _room_in(self, one: KvContext) -> float:
        """Tokens that each running rollout makes until this one fits beside the others, however they grow."""
        if self._ways_out is None:
            ways = sorted((self._rules.likely_rest(one), self._grown_blocks(one)) for one in self._running.values())
            self._ways_out = list(accumulate(blocks for _, blocks in ways)), [rest for rest, _ in ways]
        freed, rests = self._ways_out  # by those that end first, in their order
        at = bisect_left(freed, freed[-1] + self._grown_blocks(one) - self._rules.blocks)
        return rests[at] if at < len(rests) else inf

    def _grown_blocks(self, one: KvContext) -> int:
        return -(-round(self._unshared(one) + self._rules.likely_rest(one)) // self._rules.block)

    def _fits(self, one: KvContext, reserved: int) -> bool:
        if self._book.needed(one, reserved) > self._book.free:
            return False
        return self._book.peak_with(one) <= self._rules.filled * self._rules.kv_tokens


def _by_age(one: KvContext) -> tuple[float, str]:
    return one.since_s, one.key
