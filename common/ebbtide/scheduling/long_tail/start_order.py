"""Decides which waiting samples start next, so that no long one starts late.

One sample of each group goes first, as a probe: what it makes tells the length of its siblings. Then the samples with
the most tokens to come go first. Seer has this order (arXiv 2511.14617, section 2.2 of its scheduling), with the probes
that made the fewest tokens first. Here probes of groups that are known to be long go first, by their prompts' former
epochs.

Two guards are added. A sample that waited too long goes before all others, so nothing waits for ever. And where the
first sample does not fit the free memory for keys and values, others may start before it as long as they do not delay
it, as in EASY backfilling (Lifka, JSSPP 1995; Mu'alem and Feitelson, IEEE TPDS 12, 2001): they end before enough is
free for the first one, or fit beside it then.
"""

from collections.abc import Iterable, Iterator, Sequence
from math import inf
from typing import Final, NamedTuple

from msgspec import Struct

#: A sample waits at most so long while others start before it, unless the caller knows better: about as long as Seer's
#: longest responses take at 40 tokens a second.
OLDEST_S: Final = 2_400.0


class WaitingSample(Struct, frozen=True, kw_only=True, gc=False):
    """A sample that no engine runs."""

    sample: str
    group: str
    rest: float  # expected tokens to come
    longest_rest: float  # the same, as a high quantile
    kv_tokens: int  # of memory that it needs until its chunk's end
    since_s: float  # when it began to wait
    place: int  # in the order of submission
    probed: bool  # another sample of its group runs, ran or ended


class RunningSample(NamedTuple):
    """A sample that holds memory of the engine that is filled."""

    rest: float  # tokens until it gives the memory back
    kv_tokens: int


class StartOrder:
    """The order of the samples that wait at one moment.

    `oldest_s`: one that waited longer goes first. The order is of this moment; make a new one for the next.
    Invariant: `_left` has the samples that were not taken, in order.
    """

    def __init__(self, waiting: Iterable[WaitingSample], now_s: float, *, oldest_s: float = OLDEST_S) -> None:
        samples = list(waiting)
        probes = _probes(samples)
        self._overdue_since = now_s - oldest_s
        self._left = sorted(samples, key=lambda one: self._rank(one, probes))

    def __iter__(self) -> Iterator[WaitingSample]:
        """What was not taken yet, in order."""
        return iter(tuple(self._left))

    def take(self, free: int, running: Sequence[RunningSample] = (), slots: int = 1 << 30) -> list[WaitingSample]:
        """Take what starts now on an engine with so many tokens of free memory and so many free slots. `running`: the
        samples that it runs. All run equally fast.
        """
        taken = list[WaitingSample]()
        while self._left and len(taken) < slots and self._left[0].kv_tokens <= free:
            first = self._left.pop(0)
            free -= first.kv_tokens
            taken.append(first)
        if self._left and len(taken) < slots:
            busy = [*running, *(RunningSample(one.longest_rest, one.kv_tokens) for one in taken)]
            taken += self._beside_first(free, busy, slots - len(taken))
        return taken

    def _rank(self, one: WaitingSample, probes: frozenset[str]) -> tuple[int, float, int]:
        if one.since_s < self._overdue_since:
            return 0, one.since_s, one.place
        return 1 if one.sample in probes else 2, -one.rest, one.place

    def _beside_first(self, free: int, running: Sequence[RunningSample], slots: int) -> list[WaitingSample]:
        """Take what does not delay the first sample, which does not fit. A forecast may err, so nothing starts beside
        one that waited too long.
        """
        first, *others = self._left
        in_tokens, spare = _reservation(first.kv_tokens, free, running)
        if first.since_s < self._overdue_since and in_tokens < inf:
            return []
        taken, kept = list[WaitingSample](), [first]
        for one in others:
            soon = one.longest_rest <= in_tokens
            if len(taken) == slots or one.kv_tokens > (free if soon else min(free, spare)):
                kept.append(one)
                continue
            taken.append(one)
            free -= one.kv_tokens
            spare -= 0 if soon else one.kv_tokens
        self._left = kept
        return taken


def _reservation(needed: int, free: int, running: Sequence[RunningSample]) -> tuple[float, int]:
    """After how many tokens of each running sample the needed memory is free, and how much is free beside it then."""
    for one in sorted(running):
        free += one.kv_tokens
        if free >= needed:
            return one.rest, free - needed
    return inf, free  # it never fits here, so nothing delays it


def _probes(samples: Iterable[WaitingSample]) -> frozenset[str]:
    """The sample of each unprobed group that goes first: the earliest submitted one."""
    first = dict[str, WaitingSample]()
    for one in samples:
        if not one.probed and (one.group not in first or one.place < first[one.group].place):
            first[one.group] = one
    return frozenset(one.sample for one in first.values())
