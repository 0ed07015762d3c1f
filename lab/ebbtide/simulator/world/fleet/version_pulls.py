"""Shares the links of relay, workers and peers among the versions that are pulled over them.

A worker that fetches a version serves what it has of it, which is half on average over its download.

All downloads over links of one speed go on at one rate: their link's, or their part of what the sources send, whichever
is less. So what each has got follows from one running sum per speed. Invariant: `_got` of a class of links is what a
download of it would have got since the begin, had it lasted all the time.

Workers that have the newest version serve others. Each run has a relay's link of its own: runs' pulls do not meet.
"""

from collections.abc import Callable
from heapq import heapify, heappop, heappush
from itertools import count
from math import inf, ulp
from typing import Final

from msgspec import Struct

from ebbtide.simulator.world.virtual_time import Alarm, VirtualTime
from ebbtide.weight_relay.version_paths import PatchStep, find_paths, wants_keyframe

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


#: As the weight-relay's defaults: a keyframe is built after so many patches, or so large a share of the dense bytes.
KEYFRAME_EVERY: Final = 16
KEYFRAME_SHARE: Final = 0.5
#: Versions whose patches are kept; a worker with an older one pulls a keyframe.
_KEPT: Final = 64


class WeightTerms(Struct, frozen=True, kw_only=True):
    """The bytes of a run's versions."""

    dense_bytes: int
    patch_bytes: int  # 0: every version is dense


class _Library(Struct):
    terms: WeightTerms
    keyframes: dict[int, int]
    steps: list[PatchStep]
    links: SharedLinks
    newest: int = 0
    helping: float = 0.0  # bytes/s of the links of workers that have the newest version


class VersionPulls:
    """`relay_bytes_per_s`: what the relay sends to all workers together."""

    def __init__(self, time: VirtualTime, relay_bytes_per_s: float) -> None:
        self._time, self._relay = time, relay_bytes_per_s
        self._runs: dict[str, _Library] = {}
        self.bytes = 0

    def add_run(self, run: str, terms: WeightTerms) -> None:
        self._runs[run] = _Library(terms, {}, [], SharedLinks(self._time, self._relay))

    def publish(self, run: str, version: int) -> None:
        """The relay has a version, as a patch upon the one before if it knows that."""
        library = self._runs[run]
        terms, before = library.terms, library.newest
        library.newest, library.helping = version, 0.0
        library.links.help(0.0)
        if not before or not terms.patch_bytes:
            library.keyframes = {version: terms.dense_bytes}
            library.steps = []
            return
        library.steps = [*library.steps[-_KEPT:], PatchStep(before, version, terms.patch_bytes)]
        ways = find_paths(library.keyframes, library.steps, version, (), scratch=True)
        room = 8 * terms.dense_bytes
        if not ways or wants_keyframe(ways[0], terms.dense_bytes, room, every=KEYFRAME_EVERY, share=KEYFRAME_SHARE):
            library.keyframes = {version: terms.dense_bytes}

    def begin(
        self, run: str, version: int, have: int, link_bytes_per_s: float, done: Callable[[], None]
    ) -> Callable[[], None]:
        """Begin a pull by a worker that has the version `have` (0: none). `done` is called at its end: at once over a
        link without a limit, which is the trainer's own memory. Returns what stops it; once it has ended, that takes
        the worker out of those that serve the version to others.
        """
        library = self._runs[run]
        if have == version or link_bytes_per_s == inf:
            done()
            return lambda: None
        ways = find_paths(library.keyframes, library.steps, version, (have,) if have else ())
        size = ways[0].size if ways else library.terms.dense_bytes
        self.bytes += size
        ended = False

        def pulled() -> None:
            nonlocal ended
            ended = True
            self._serve(library, version, link_bytes_per_s)
            done()

        stop = library.links.download(size, link_bytes_per_s, pulled)
        return lambda: self._serve(library, version, -link_bytes_per_s) if ended else stop()

    def _serve(self, library: _Library, version: int, link_bytes_per_s: float) -> None:
        """Note that a worker with so fast a link serves a version; less than 0: that it no longer does."""
        if version == library.newest:
            library.helping += link_bytes_per_s
            library.links.help(library.helping)
