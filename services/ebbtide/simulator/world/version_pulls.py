"""Models how long workers pull versions: by the relay's cheapest ways, over links that pulls share.

A pull's rate is set when it begins: the worker's link, or its part of the relay's link, whichever is less. Workers that
have the version serve others, so the relay's part grows with them.
"""

from math import inf

from msgspec import Struct

from ebbtide.scheduling.distribution.version_paths import PatchStep, find_ways, wants_anchor
from ebbtide.simulator.world.virtual_time import VirtualTime

#: As the weight-relay's defaults: an anchor is built after so many patches, or so large a share of the dense bytes.
ANCHOR_EVERY = 16
ANCHOR_SHARE = 0.5
#: Versions whose patches are kept; a worker with an older one pulls an anchor.
_KEPT = 64


class WeightTerms(Struct, frozen=True, kw_only=True):
    """The bytes of a run's versions."""

    dense_bytes: int
    patch_bytes: int  # 0: every version is dense


class _Library(Struct):
    terms: WeightTerms
    anchors: dict[int, int]
    steps: list[PatchStep]
    newest: int = 0


class VersionPulls:
    """`relay_bytes_per_s`: what the relay sends to all workers together."""

    def __init__(self, time: VirtualTime, relay_bytes_per_s: float) -> None:
        self._time, self._relay = time, relay_bytes_per_s
        self._runs: dict[str, _Library] = {}
        self._pulling = 0
        self.bytes = 0

    def add_run(self, run: str, terms: WeightTerms) -> None:
        self._runs[run] = _Library(terms, {}, [])

    def publish(self, run: str, version: int) -> None:
        """The relay has a version, as a patch upon the one before if it knows that."""
        library = self._runs[run]
        terms, before = library.terms, library.newest
        library.newest = version
        if not before or not terms.patch_bytes:
            library.anchors = {version: terms.dense_bytes}
            library.steps = []
            return
        library.steps = [*library.steps[-_KEPT:], PatchStep(before, version, terms.patch_bytes)]
        ways = find_ways(library.anchors, library.steps, version, (), scratch=True)
        room = 8 * terms.dense_bytes
        if not ways or wants_anchor(ways[0], terms.dense_bytes, room, every=ANCHOR_EVERY, share=ANCHOR_SHARE):
            library.anchors = {version: terms.dense_bytes}

    def begin(self, run: str, version: int, have: int, link_bytes_per_s: float, holders: int) -> float:
        """Begin a pull by a worker that has the version `have` (0: none), while `holders` others have the wanted one.
        Returns the seconds that it takes: none over a link without a limit, which is the trainer's own memory.
        """
        library = self._runs[run]
        if have == version or link_bytes_per_s == inf:
            return 0.0
        ways = find_ways(library.anchors, library.steps, version, (have,) if have else ())
        size = ways[0].size if ways else library.terms.dense_bytes
        self.bytes += size
        self._pulling += 1
        shared = self._relay * (1 + holders) / self._pulling
        seconds = size / min(link_bytes_per_s, shared)
        self._time.after(seconds, self._ended)
        return seconds

    def _ended(self) -> None:
        self._pulling -= 1
