"""Who holds or fetches what, as they tell in FindWay, and whom a requester is sent to.

Soft state: each entry lives for `LOST_S` behind its holder's last word, and a restarted relay hears of all of them
again within `AGAIN_S`. Only the servicer's FindWay writes here, without waiting in between.
"""

import heapq
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Annotated, Final

from msgspec import Meta, Struct

from ebbtide.errors import NoCapacity
from ebbtide.scheduling.distribution.source_ranking import (
    ORIGIN,
    BlobOrigin,
    SourceComplaints,
    VersionCopy,
    choose_sources,
    lasting_copies,
)
from ebbtide.types.weights import BlobSource, Holder, HolderState
from ebbtide.weight_relay import metrics
from ebbtide.weight_relay.library.version_records import Node, Stream

#: How often holders are to ask again while they fetch or serve, and behind which silence they count as gone.
AGAIN_S: Final = 5.0
LOST_S: Final = 3 * AGAIN_S
#: Copies known at once; a fleet far beyond what one relay can answer.
MAX_COPIES: Final = 1 << 16
#: Versions that are remembered of what a holder has: the newest ones.
MAX_HAVE: Final = 64
#: Copies of a run that are shown, those heard of last: with the longest names they fit into a message.
MAX_SHOWN: Final = 1000
#: The longest stop of generation, in seconds, that is believed.
_MAX_INSTALL_S: Final = 86_400.0
_VERSIONS = Annotated[tuple[int, ...], Meta(max_length=1024)]
_ADDRESSES = Annotated[tuple[Annotated[str, Meta(max_length=512)], ...], Meta(max_length=64)]


class WayRequest(Struct, frozen=True, kw_only=True):
    """FindWay's request, as `weights.proto` says. Without a holder nothing is noted.

    A holder without an address for which a version is `done` has it in its engine alone: it is no source, and needs
    nothing but the way on from there.
    """

    run_id: str
    policy: str
    holder: Holder | None = None
    version: int = 0
    have: _VERSIONS = ()
    bytes_per_s: Annotated[float, Meta(ge=0, le=1e15)] = 0.0
    failed: _ADDRESSES = ()
    done: bool = False
    install_s: Annotated[float, Meta(ge=0, le=_MAX_INSTALL_S)] = 0.0
    scratch: bool = False

    @property
    def stream(self) -> Stream:
        return self.run_id, self.policy


class HolderTable:
    def __init__(
        self, origin: BlobOrigin, copies: Sequence[str] = (), *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`copies`: URLs of static copies, which readers are sent to in place of this relay."""
        self._origin, self._clock = origin, clock
        self._static = [BlobSource(name=url, address=url, static=True) for url in copies]
        self._copies: dict[Node, dict[str, VersionCopy]] = {}
        self._count = 0  # of all copies
        self._have: dict[tuple[Stream, str], tuple[tuple[int, ...], float]] = {}
        self._complaints = SourceComplaints()
        self._order = 0
        self._looked_at = -LOST_S

    def told(self, request: WayRequest, version: int, *, peer: bool = True) -> list[BlobSource]:
        """Note what a holder says of `version`, which it wants or has, and name sources for it, best first.

        This relay is the source without an address. What failed one that is no `peer` counts for this answer alone:
        names are the caller's to choose, and several would keep all runs' readers from any address.
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
        shunned = self._complaints.shunned(name, now).union(request.failed)
        names = choose_sources(copy, copies.values(), self._origin, shunned)
        if len(names) > 1 and names[-1] == ORIGIN:
            names.pop()  # the last resort needs no name: the requester knows whom it asks
        return [
            source
            for name in names
            for source in (self._itself(shunned) if name == ORIGIN else [_source(copies[name].holder)])
        ]

    def forget(self, run_id: str) -> None:
        """A run has ended: nobody is sent anywhere for its versions any more."""
        for node in [node for node in self._copies if node[0][0] == run_id]:
            self._count -= len(self._copies.pop(node))
        for key in [key for key in self._have if key[0][0] == run_id]:
            del self._have[key]
        metrics.HOLDERS.set(self._count)

    def fetching(self, stream: Stream, version: int) -> int:
        """Holders that are fetching the version now."""
        return sum(1 for copy in self._live((stream, version)) if not copy.done)

    def lasting(self, stream: Stream, version: int) -> int:
        """Whole copies that count as safe, besides this relay's own."""
        return lasting_copies(self._live((stream, version)))

    def needed(self) -> set[Node]:
        """Versions that somebody holds or fetches: ways from and to these are asked for."""
        now = self._clock()
        have = {
            (stream, version)
            for (stream, _), (versions, seen) in self._have.items()
            if now - seen < LOST_S
            for version in versions
        }
        return have | {node for node in self._copies if any(True for _ in self._live(node))}

    def states(self, run_id: str) -> tuple[list[HolderState], int]:
        """The copies of a run's versions, in the order of policy, version and name; and how many are left out."""
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
            # One that has lost what it held stands behind all that may read from it.
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

    def _itself(self, shunned: Collection[str]) -> list[BlobSource]:
        """This relay, or the static copies in its place."""
        static = [source for source in self._static if source.address not in shunned]
        return static or [BlobSource(name=ORIGIN, address="", site=self._origin.site)]


def _source(holder: Holder) -> BlobSource:
    return BlobSource(name=holder.name, address=holder.address, site=holder.site, host=holder.host)
