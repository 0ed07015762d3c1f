"""Records the copies that holders report in FindWay, and chooses sources for each requester.

Soft state: an entry lives for `LOST_S` after its holder's last report, and a restarted relay hears of all holders
within `AGAIN_S`. Only the servicer's FindWay writes here, without an await in between.
"""

import heapq
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Final

from ebbtide.errors import NoCapacity
from ebbtide.scheduling.distribution.retained_bytes import Node, Stream
from ebbtide.scheduling.distribution.source_ranking import (
    ORIGIN,
    BlobOrigin,
    SourceComplaints,
    VersionCopy,
    choose_sources,
    lasting_copies,
)
from ebbtide.transfer.version_finder import WayRequest
from ebbtide.types.weights import BlobSource, Holder, HolderState
from ebbtide.weight_relay import metrics

#: How often holders report while they fetch or serve, and after which silence they count as gone.
AGAIN_S: Final = 5.0
LOST_S: Final = 3 * AGAIN_S
#: Copies known at once: a fleet far beyond what one relay can answer.
MAX_COPIES: Final = 1 << 16
#: Versions remembered of each holder: its newest ones.
MAX_HAVE: Final = 64
#: Copies of a run that are shown, the latest ones: with the longest names they fit into a message.
MAX_SHOWN: Final = 1000


class HolderTable:
    def __init__(
        self, origin: BlobOrigin, copies: Sequence[str] = (), *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`copies`: URLs of static copies. Readers are sent there instead of here."""
        self._origin, self._clock = origin, clock
        self._static = [BlobSource(name=url, address=url, static=True) for url in copies]
        self._copies: dict[Node, dict[str, VersionCopy]] = {}
        self._count = 0  # of all copies
        self._have: dict[tuple[Stream, str], tuple[tuple[int, ...], float]] = {}
        self._complaints = SourceComplaints()
        self._order = 0
        self._looked_at = -LOST_S

    def told(self, request: WayRequest, version: int, *, peer: bool = True) -> list[BlobSource]:
        """Record that a holder wants or has `version`, and name sources for it, best first.

        This relay is the source without an address. Failures that a caller reports count for this answer alone unless
        it is a `peer`: callers choose their names, and several names could keep all readers from any address.
        Raises `NoCapacity` beyond `MAX_COPIES`.
        """
        now = self._clock()
        if request.holder is None:
            return self._itself(())
        name = request.holder.name
        self._forget_lost(now)
        copy = self._copy(request, request.holder, (request.stream, version), now)
        if peer:
            self._complaints.add(name, request.failed, now)
        self._have[request.stream, name] = tuple(sorted(request.have)[-MAX_HAVE:]), now
        if copy.done:
            return []
        copies = {one.holder.name: one for one in self._live((request.stream, version))}
        quarantined = self._complaints.quarantined(name, now).union(request.failed)
        names = choose_sources(copy, copies.values(), self._origin, quarantined)
        if len(names) > 1 and names[-1] == ORIGIN:
            names.pop()  # the last resort needs no name: the requester knows this relay
        return [
            source
            for name in names
            for source in (self._itself(quarantined) if name == ORIGIN else [_source(copies[name].holder)])
        ]

    def forget(self, run_id: str) -> None:
        """Forget all holders of a run that has ended."""
        for node in [node for node in self._copies if node[0][0] == run_id]:
            self._count -= len(self._copies.pop(node))
        for key in [key for key in self._have if key[0][0] == run_id]:
            del self._have[key]
        metrics.HOLDERS.set(self._count)

    def fetching(self, stream: Stream, version: int) -> int:
        """Count the holders that are fetching the version now."""
        return sum(1 for copy in self._live((stream, version)) if not copy.done)

    def lasting(self, stream: Stream, version: int) -> int:
        """Count the whole copies that are safe, besides this relay's own."""
        return lasting_copies(self._live((stream, version)))

    def needed(self) -> set[Node]:
        """The versions that live holders have or fetch, and need ways from and to."""
        now = self._clock()
        have = {
            (stream, version)
            for (stream, _), (versions, seen) in self._have.items()
            if now - seen < LOST_S
            for version in versions
        }
        return have | {node for node in self._copies if any(True for _ in self._live(node))}

    def states(self, run_id: str) -> tuple[list[HolderState], int]:
        """The copies of a run's versions by policy, version and name, and the number of those left out."""
        now = self._clock()
        copies = [
            (stream[1], version, name, copy)
            for (stream, version), copies in self._copies.items()
            for name, copy in copies.items()
            if stream[0] == run_id and now - copy.seen < LOST_S
        ]
        shown = heapq.nlargest(MAX_SHOWN, copies, key=lambda item: item[3].seen)
        states = [
            HolderState(
                holder=copy.holder,
                policy=policy,
                version=version,
                done=copy.done,
                install_s=copy.install_s,
                seen_s=now - copy.seen,
            )
            for policy, version, _, copy in sorted(shown, key=lambda item: item[:3])
        ]
        return states, len(copies) - len(shown)

    def _copy(self, request: WayRequest, holder: Holder, node: Node, now: float) -> VersionCopy:
        copy = self._copies.get(node, {}).get(holder.name)
        if copy is None:
            if self._count >= MAX_COPIES:
                raise NoCapacity(f"{MAX_COPIES} copies are known to this relay; add relays", retry_after_s=AGAIN_S)
            self._count += 1
        if copy is None or (copy.done and not request.done):
            # A holder that has lost its copy comes after all that may read from it.
            self._order += 1
            copy = VersionCopy(holder=holder, order=self._order, seen=now)
            self._copies.setdefault(node, {})[holder.name] = copy
        copy.holder, copy.seen, copy.done = holder, now, request.done
        if request.install_s and request.install_s != copy.install_s:
            copy.install_s = request.install_s
            metrics.INSTALL_SECONDS.observe(request.install_s)
        return copy

    def _live(self, node: Node) -> Iterable[VersionCopy]:
        oldest = self._clock() - LOST_S
        return (copy for copy in self._copies.get(node, {}).values() if copy.seen > oldest)

    def _forget_lost(self, now: float) -> None:
        if now - self._looked_at < 1.0:
            return
        self._looked_at = now
        for node, copies in list(self._copies.items()):
            for name in [name for name, copy in copies.items() if now - copy.seen >= LOST_S]:
                del copies[name]
            if not copies:
                del self._copies[node]
        for key in [key for key, (_, seen) in self._have.items() if now - seen >= LOST_S]:
            del self._have[key]
        self._count = sum(map(len, self._copies.values()))
        metrics.HOLDERS.set(self._count)

    def _itself(self, quarantined: Collection[str]) -> list[BlobSource]:
        """This relay, or the static copies in its place."""
        static = [source for source in self._static if source.address not in quarantined]
        return static or [BlobSource(name=ORIGIN, address="", site=self._origin.site)]


def _source(holder: Holder) -> BlobSource:
    return BlobSource(name=holder.name, address=holder.address, site=holder.site, host=holder.host)
