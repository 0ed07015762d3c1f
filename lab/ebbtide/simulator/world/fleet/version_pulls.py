"""Models what workers pull of a version, and from whom: by the relay's cheapest ways, over links that pulls share.

Workers that have the newest version serve others. Each run has a relay's link of its own: runs' pulls do not meet.
"""

from collections.abc import Callable
from math import inf
from typing import Final

from msgspec import Struct

from ebbtide.scheduling.distribution.version_paths import PatchStep, find_ways, wants_anchor
from ebbtide.simulator.world.fleet.shared_links import SharedLinks
from ebbtide.simulator.world.virtual_time import VirtualTime

#: As the weight-relay's defaults: an anchor is built after so many patches, or so large a share of the dense bytes.
ANCHOR_EVERY: Final = 16
ANCHOR_SHARE: Final = 0.5
#: Versions whose patches are kept; a worker with an older one pulls an anchor.
_KEPT: Final = 64


class WeightTerms(Struct, frozen=True, kw_only=True):
    """The bytes of a run's versions."""

    dense_bytes: int
    patch_bytes: int  # 0: every version is dense


class _Library(Struct):
    terms: WeightTerms
    anchors: dict[int, int]
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
            library.anchors = {version: terms.dense_bytes}
            library.steps = []
            return
        library.steps = [*library.steps[-_KEPT:], PatchStep(before, version, terms.patch_bytes)]
        ways = find_ways(library.anchors, library.steps, version, (), scratch=True)
        room = 8 * terms.dense_bytes
        if not ways or wants_anchor(ways[0], terms.dense_bytes, room, every=ANCHOR_EVERY, share=ANCHOR_SHARE):
            library.anchors = {version: terms.dense_bytes}

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
        ways = find_ways(library.anchors, library.steps, version, (have,) if have else ())
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
