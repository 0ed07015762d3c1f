"""Decides which send is next, and when: limits links' rates, and takes fair turns among links and their readers.

Turns follow start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996) with equal weights, on two levels: the link,
then the reader in it, that was given the fewest bytes goes next, and one that was idle starts level with those that
wait. A reader's own asks go in order, so that many streams give it no more than one.
"""

import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Final

from msgspec import Struct

#: Burst of a link after a pause, in seconds of its rate: enough that a timer's delay costs no rate.
BURST_S: Final = 0.05
#: Over which `LinkRate` forgets, in seconds.
RATE_S: Final = 10.0


class TokenBucket:
    """A token bucket that may go into debt by one item, so that an item larger than the burst passes too."""

    def __init__(self, rate: float, now: float) -> None:
        """`rate`: bytes per second; 0: no limit."""
        self._rate, self._burst = rate, rate * BURST_S
        self._level, self._at = self._burst, now

    def wait(self, now: float) -> float:
        """Seconds until something may be taken; 0: now."""
        if not self._rate:
            return 0.0
        self._level = min(self._burst, self._level + (now - self._at) * self._rate)
        self._at = now
        return max(0.0, -self._level / self._rate)

    def is_full(self, now: float) -> bool:
        """Whether it equals a new one."""
        return not self._rate or (self.wait(now) == 0.0 and self._level == self._burst)

    def take(self, size: int) -> None:
        """Take `size` bytes, just after `wait` gave 0."""
        if self._rate:
            self._level -= size


class LinkAsk(Struct, eq=False):
    """A wish to send `size` bytes to `reader` of `link`."""

    link: str
    reader: str
    size: int


class _Level:
    """Turns among names by the bytes that they were given, which is kept for as long as it matters."""

    def __init__(self) -> None:
        self._given: dict[str, float] = {}
        self._now = 0.0  # the level from which the last turn was given

    def enter(self, name: str) -> None:
        self._given[name] = max(self._given.get(name, 0.0), self._now)

    def first(self, names: Iterable[str]) -> str:
        return min(names, key=self._given.__getitem__)

    def give(self, name: str, size: int) -> None:
        self._now = self._given[name]
        self._given[name] += size

    def forget(self, waiting: Collection[str]) -> None:
        """Drop names that would come back on the common level anyway."""
        if len(self._given) > 2 * len(waiting) + 16:
            self._given = {name: given for name, given in self._given.items() if given > self._now or name in waiting}


class _Link:
    def __init__(self, rate: float, now: float) -> None:
        self.bucket = TokenBucket(rate, now)
        self.waiting: dict[str, deque[LinkAsk]] = {}
        self.level = _Level()


class UploadScheduler:
    """Orders the asks that wait. One task at a time writes it.

    Invariant: an idle link is kept only while it has sent more than it had saved up.
    """

    def __init__(self, *, total: float, rate_of: Callable[[str], float], now: float) -> None:
        """`total` bytes per second for all links together and `rate_of(link)` for each; 0: no limit."""
        self._total, self._rate_of = TokenBucket(total, now), rate_of
        self._links: dict[str, _Link] = {}
        self._level = _Level()

    def add(self, ask: LinkAsk, now: float) -> None:
        link = self._links.get(ask.link)
        if link is None:
            link = self._links[ask.link] = _Link(self._rate_of(ask.link), now)
        if not link.waiting:
            self._level.enter(ask.link)
            self._level.forget(self._links)
        if ask.reader not in link.waiting:
            link.level.enter(ask.reader)
            link.level.forget(link.waiting)
        link.waiting.setdefault(ask.reader, deque()).append(ask)

    def drop(self, ask: LinkAsk) -> None:
        """Forget an ask that still waits."""
        waiting = self._links[ask.link].waiting
        waiting[ask.reader].remove(ask)
        if not waiting[ask.reader]:
            del waiting[ask.reader]

    def next(self, now: float) -> LinkAsk | None:
        """Remove and return the next ask; None when there is none, or none before `wait` is over."""
        if self._total.wait(now):
            return None
        for name in [name for name, link in self._links.items() if not link.waiting and link.bucket.is_full(now)]:
            del self._links[name]
        ready = [name for name, link in self._links.items() if link.waiting and not link.bucket.wait(now)]
        if not ready:
            return None
        link = self._links[self._level.first(ready)]
        ask = link.waiting[link.level.first(link.waiting)][0]
        for bucket in (self._total, link.bucket):
            bucket.take(ask.size)
        self._level.give(ask.link, ask.size)
        link.level.give(ask.reader, ask.size)
        self.drop(ask)
        return ask

    def wait(self, now: float) -> float:
        """Seconds until `next` may return an ask; infinite when none waits."""
        links = min((link.bucket.wait(now) for link in self._links.values() if link.waiting), default=math.inf)
        return max(links, self._total.wait(now))


class LinkRate:
    """Bytes per second lately, and in all."""

    def __init__(self, now: float) -> None:
        self.total = 0
        self._rate, self._at = 0.0, now

    def add(self, size: int, now: float) -> None:
        self._rate = self.lately(now) + size / RATE_S
        self._at = now
        self.total += size

    def lately(self, now: float) -> float:
        return self._rate * math.exp((self._at - now) / RATE_S)


def parse_limits(pairs: Iterable[str]) -> Mapping[str, float]:
    """Parse limits "NAME=BYTES_PER_S", with "*" for all other names. Raises `ValueError`."""
    limits: dict[str, float] = {}
    for pair in pairs:
        name, equals, text = pair.rpartition("=")
        try:
            value = float(text) if equals and name else -1.0
        except ValueError:
            value = -1.0
        if not (0 <= value < math.inf):
            raise ValueError(f"{pair!r} must be NAME=BYTES_PER_S, such as north=1.25e8")
        if name in limits:
            raise ValueError(f"{pair!r} names {name} once more")
        limits[name] = value
    return limits
