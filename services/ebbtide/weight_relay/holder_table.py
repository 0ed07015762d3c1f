"""Records the copies that holders report in FindWay, and chooses sources for each requester.

Soft state: an entry lives for `LOST_S` after its holder's last report, and a restarted relay hears of all holders
within `AGAIN_S`. Only the servicer's FindWay writes here, without an await in between.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from itertools import islice
from typing import Final

from ebbtide.errors import NoCapacity
from ebbtide.transfer.version_finder import PathRequest
from ebbtide.types.weights import BlobSource, Holder, HolderState
from ebbtide.weight_relay import metrics
from ebbtide.weight_relay.retention import Node, Stream
from ebbtide.weight_relay.source_ranking import ORIGIN, BlobOrigin, SourceComplaints, VersionCopies, VersionCopy

#: How often holders report while they fetch or serve, and after which silence they count as gone.
AGAIN_S: Final = 5.0
LOST_S: Final = 3 * AGAIN_S
#: Copies known at once: a fleet far beyond what one relay can answer. Runs share them: see `_make_room`.
MAX_COPIES: Final = 1 << 16
#: Versions remembered of each holder: its newest ones.
MAX_HAVE: Final = 64
#: Copies of a run that are shown, the latest ones: with the longest names they fit into a message.
MAX_SHOWN: Final = 1000
_RunCopies = OrderedDict[tuple[Node, str], VersionCopy]  # by version and name of the holder


class HolderTable:
    def __init__(
        self, origin: BlobOrigin, copies: Sequence[str] = (), *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`copies`: URLs of static copies. Readers are sent there instead of here."""
        self._origin, self._clock = origin, clock
        self._static = [BlobSource(name=url, address=url, static=True) for url in copies]
        self._versions: dict[Node, VersionCopies] = {}
        #: The copies of each run, those heard of longest ago first.
        self._runs: dict[str, _RunCopies] = {}
        self._count = 0  # of all copies
        self._complaints = SourceComplaints()
        self._order = 0

    def told(self, request: PathRequest, version: int, *, peer: bool = True) -> list[BlobSource]:
        """Record that a holder wants or has `version`, and name sources for it, best first.

        This relay is the source without an address. Failures that a caller reports count for this answer alone unless
        it is a `peer`: callers choose their names, and several names could keep all readers from any address.
        Raises `NoCapacity` beyond `MAX_COPIES`, if no other run has more of them.
        """
        now = self._clock()
        if request.holder is None:
            return self._itself(())
        name = request.holder.name
        self._forget_lost()
        copy = self._copy(request, request.holder, (request.stream, version), now)
        if peer:
            self._complaints.add(name, request.failed, now)
        if copy.done:
            return []
        copies = self._versions[request.stream, version]
        quarantined = self._complaints.quarantined(name, now).union(request.failed)
        names = copies.choose(copy, self._origin, quarantined)
        if len(names) > 1 and names[-1] == ORIGIN:
            names.pop()  # the last resort needs no name: the requester knows this relay
        return [
            source
            for name in names
            for source in (self._itself(quarantined) if name == ORIGIN else [_source(copies.by_name[name].holder)])
        ]

    def forget(self, run_id: str) -> None:
        """Forget all holders of a run that has ended."""
        for node, name in list(self._of(run_id)):
            self._drop(node, name)
        metrics.HOLDERS.set(self._count)

    def fetching(self, stream: Stream, version: int) -> int:
        """Count the holders that are fetching the version now."""
        self._forget_lost()
        copies = self._versions.get((stream, version))
        return copies.arriving if copies else 0

    def lasting(self, stream: Stream, version: int) -> int:
        """Count the whole copies that are safe, besides this relay's own."""
        self._forget_lost()
        copies = self._versions.get((stream, version))
        return copies.lasting if copies else 0

    def needed(self) -> set[Node]:
        """The versions that live holders have or fetch, and need ways from and to."""
        self._forget_lost()
        have = {
            (stream, version)
            for (stream, _), copies in self._versions.items()
            for copy in copies.by_name.values()
            for version in copy.have
        }
        return have.union(self._versions)

    def states(self, run_id: str) -> tuple[list[HolderState], int]:
        """The copies of a run's versions by policy, version and name, and the number of those left out."""
        self._forget_lost()
        now, copies = self._clock(), self._of(run_id)
        shown = islice(reversed(copies.items()), MAX_SHOWN)
        states = [
            HolderState(
                holder=copy.holder,
                policy=policy,
                version=version,
                done=copy.done,
                install_s=copy.install_s,
                seen_s=now - copy.seen,
            )
            for (((_, policy), version), _), copy in sorted(shown, key=lambda item: item[0])
        ]
        return states, len(copies) - len(states)

    def _of(self, run_id: str) -> _RunCopies:
        return self._runs.get(run_id, _RunCopies())

    def _copy(self, request: PathRequest, holder: Holder, node: Node, now: float) -> VersionCopy:
        run_id, key = request.run_id, (node, holder.name)
        copy = self._of(run_id).get(key)
        if copy is None and self._count >= MAX_COPIES:
            self._make_room(run_id)
        if copy is None or (copy.done and not request.done):
            # A holder that has lost its copy comes after all that may read from it.
            self._drop(*key)
            self._order += 1
            copy = VersionCopy(holder=holder, order=self._order, seen=now)
            self._versions.setdefault(node, VersionCopies()).add(copy)
            self._runs.setdefault(run_id, _RunCopies())[key] = copy
            self._count += 1
        self._runs[run_id].move_to_end(key)
        self._versions[node].update(copy, holder, done=request.done)
        copy.seen, copy.have = now, tuple(sorted(request.have)[-MAX_HAVE:])
        if request.install_s and request.install_s != copy.install_s:
            copy.install_s = request.install_s
            metrics.INSTALL_SECONDS.observe(request.install_s)
        return copy

    def _make_room(self, run_id: str) -> None:
        """Forget the copy that was heard of longest ago, of the run with the most. Raises `NoCapacity` if none has more
        than `run_id`."""
        most = max(self._runs, key=lambda run: len(self._runs[run]))
        if len(self._runs[most]) <= len(self._of(run_id)) + 1:
            raise NoCapacity(f"{MAX_COPIES} copies are known to this relay; add relays", retry_after_s=AGAIN_S)
        self._drop(*next(iter(self._runs[most])))

    def _drop(self, node: Node, name: str) -> None:
        """Forget a copy, if it is known."""
        run_id = node[0][0]
        copies = self._of(run_id)
        if copies.pop((node, name), None) is None:
            return
        self._count -= 1
        self._versions[node].remove(name)
        if not self._versions[node].by_name:
            del self._versions[node]
        if not copies:
            del self._runs[run_id]

    def _forget_lost(self) -> None:
        oldest = self._clock() - LOST_S
        for copies in list(self._runs.values()):
            while copies and next(iter(copies.values())).seen <= oldest:
                self._drop(*next(iter(copies)))
        metrics.HOLDERS.set(self._count)

    def _itself(self, quarantined: Collection[str]) -> list[BlobSource]:
        """This relay, or the static copies in its place."""
        static = [source for source in self._static if source.address not in quarantined]
        return static or [BlobSource(name=ORIGIN, address="", site=self._origin.site)]


def _source(holder: Holder) -> BlobSource:
    return BlobSource(name=holder.name, address=holder.address, site=holder.site, host=holder.host)
