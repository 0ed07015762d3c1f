"""Models downloads that share their sources: the relay's link, and those of workers that have the version already.

A worker that fetches a version serves what it has of it, which is half on average over its download.

All downloads over links of one speed go on at one rate: their link's, or their part of what the sources send, whichever
is less. So what each has got follows from one running sum per speed. Invariant: `_got` of a class of links is what a
download of it would have got since the begin, had it lasted all the time.
"""

from collections.abc import Callable
from heapq import heapify, heappop, heappush
from itertools import count
from math import inf, ulp
from typing import Final

from ebbtide.simulator.world.virtual_time import Alarm, VirtualTime

#: A download is done when so little of a byte is left, for rounding alone.
_NOTHING: Final = 1e-3
#: What a worker that fetches has of a version, on average over its download.
_PARTLY: Final = 0.5


class _Class:
    """The downloads over links of one speed."""

    def __init__(self) -> None:
        self.got = 0.0
        self.ends: list[tuple[float, int, Callable[[], None]]] = []


class SharedLinks:
    def __init__(self, time: VirtualTime, relay_bytes_per_s: float) -> None:
        """`relay_bytes_per_s`: what the relay sends to all together."""
        self._time, self._relay = time, relay_bytes_per_s
        self._classes: dict[float, _Class] = {}
        self._numbers = count()
        self._seen = 0.0
        self._helping = 0.0  # bytes/s that workers with the version add
        self._active = 0
        self._fetching = 0.0  # bytes/s of the links of active downloads, together
        self._due = Alarm(time, self._look)

    def download(self, size: float, link_bytes_per_s: float, done: Callable[[], None]) -> Callable[[], None]:
        """Begin a download; `done` is called at its end. Returns what stops it, and does nothing once it has ended."""
        self._follow()
        links = self._classes.setdefault(link_bytes_per_s, _Class())
        number = next(self._numbers)
        heappush(links.ends, (links.got + size, number, done))
        self._begun(link_bytes_per_s, 1)
        return lambda: self._stop(link_bytes_per_s, number)

    def _stop(self, link: float, number: int) -> None:
        links = self._classes[link]
        left = [one for one in links.ends if one[1] != number]
        if len(left) < len(links.ends):
            self._follow()
            links.ends = left
            heapify(left)
            self._begun(link, -1)

    def _begun(self, link: float, more: int) -> None:
        self._active += more
        self._fetching += more * link
        self._plan()

    def help(self, bytes_per_s: float) -> None:
        """Note that other sources send so much from now on, the relay's aside."""
        self._follow()
        self._helping = bytes_per_s
        self._plan()

    def _rate(self, link: float) -> float:
        return min(link, (self._relay + self._helping + _PARTLY * self._fetching) / max(1, self._active))

    def _follow(self) -> None:
        passed, self._seen = self._time.now - self._seen, self._time.now
        if passed > 0.0:
            for link, links in self._classes.items():
                if links.ends:
                    links.got += passed * self._rate(link)

    def _plan(self) -> None:
        next_s = inf
        for link, links in self._classes.items():
            if links.ends:
                next_s = min(next_s, max(0.0, links.ends[0][0] - links.got) / self._rate(link))
        self._due.set(self._time.now + next_s)

    def _look(self) -> None:
        self._follow()
        ended = []
        for link, links in self._classes.items():
            # Late in a scenario, time cannot tell moments apart in which more than that arrives.
            nothing = max(_NOTHING, 2.0 * self._rate(link) * ulp(self._time.now))
            while links.ends and links.ends[0][0] - links.got <= nothing:
                ended.append(heappop(links.ends)[2])
                self._fetching -= link
            if not links.ends:
                links.got = 0.0  # so that the sum keeps its digits
        self._active -= len(ended)
        self._plan()
        for done in ended:
            done()
