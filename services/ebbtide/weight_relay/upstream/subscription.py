"""What this relay brings here from its upstream: the newest version of every policy, and any that is asked for here.

Invariant: of each stream one version arrives at a time, so that no blob crosses the link twice; only `_Arrivals.work`
starts and ends arrivals. What was asked for here takes turns with the newest, while somebody waits for it; what finds
no room is refused to who asked for it, and keeps nothing else away. An older arrival is given up once nobody reads it
here, and its blobs go only when the next has begun, which may want them too. All of it is in memory: a restarted relay
hears of the versions again, and finds on disk what had come.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Collection, Container
from contextlib import suppress
from typing import Final

from ebbtide import telemetry
from ebbtide.errors import ChunkCorrupt, EbbtideError, Internal, NoCapacity, Unauthenticated, Unavailable
from ebbtide.rpc.backoff import pauses
from ebbtide.transfer.mirror.digest_threads import DigestThreads
from ebbtide.weight_relay import metrics
from ebbtide.weight_relay.intake.version_intake import VersionIntake
from ebbtide.weight_relay.library.ended_runs import EndedRuns
from ebbtide.weight_relay.library.version_index import VersionIndex
from ebbtide.weight_relay.library.version_records import Stream
from ebbtide.weight_relay.outlets.holder_table import AGAIN_S, LOST_S, HolderTable
from ebbtide.weight_relay.upstream.relay_upstream import Upstream, best_way
from ebbtide.weight_relay.upstream.version_arrival import VersionArrival

log = telemetry.get_logger(__name__)

#: How long a request here waits for a version to begin to arrive; well within a unary call's deadline.
PATIENCE_S: Final = 10.0
#: How often it is seen whether an outdated arrival still has readers.
_LOOK_S: Final = 0.2
#: Within which one who asked for a version is to be heard of as its reader; till then it is not given up.
_GRACE_S: Final = LOST_S


class Subscription:
    def __init__(
        self,
        publishing: VersionIntake,
        index: VersionIndex,
        ended: EndedRuns,
        holders: HolderTable,
        upstream: Upstream,
        runs: Collection[str] = (),
        *,
        patience_s: float = PATIENCE_S,
    ) -> None:
        """`runs`: those to follow; none: all. `patience_s`: how long `ask` waits."""
        self._publishing, self._index, self._ended = publishing, index, ended
        self._holders, self._upstream, self._runs = holders, upstream, runs
        self._patience_s = patience_s
        self._streams: dict[Stream, _Arrivals] = {}
        self._works: dict[Stream, asyncio.Task[None]] = {}
        self._group = asyncio.TaskGroup()
        self._threads = DigestThreads()  # for digests

    async def run(self) -> None:
        """For ever: follow the upstream, and let it know what is here."""
        try:
            async with self._group:
                self._group.create_task(self._follow())
                self._group.create_task(self._tell())
        finally:
            self._threads.close()

    async def ask(self, run_id: str, policy: str, version: int) -> int:
        """Have `version` (0: the newest) brought at once unless it is here or arriving; what to read, once it can be.

        Raises what keeps the upstream from giving it, `NoCapacity` if it does not fit here, and `Unavailable` when it
        takes more than the patience.
        """
        stream = run_id, policy
        self._ended.refuse(run_id)
        if self._here(stream, version) or (self._runs and run_id not in self._runs):
            return version
        name, state = f"version {version}" if version else "the newest version", "not known upstream yet"
        try:
            async with asyncio.timeout(self._patience_s):
                if stream not in self._streams or not self._streams[stream].expects(version):
                    version = await self._resolve(stream, version)
                state = "on its way from upstream"
                await self._arrivals(stream).ask(version)
        except TimeoutError:
            raise Unavailable(f"{name} of policy {policy} of run {run_id} is {state}; ask again") from None
        return version

    async def forget(self, run_id: str) -> None:
        """A run has ended: nothing of it comes any more."""
        streams = [stream for stream in self._streams if stream[0] == run_id]
        works = [self._works.pop(stream) for stream in streams]
        for stream, work in zip(streams, works, strict=True):
            del self._streams[stream]
            work.cancel()
        await asyncio.gather(*works, return_exceptions=True)

    def _here(self, stream: Stream, version: int) -> bool:
        return version in self._index.stream(stream) if version else bool(self._index.whole(stream))

    async def _resolve(self, stream: Stream, version: int) -> int:
        """The number of a version that the upstream has; `version` 0: its newest."""
        have = sorted(self._index.whole(stream))
        way = best_way(await self._upstream.find(stream, version, have), have)
        return (way.start, *way.via)[-1]

    def _arrivals(self, stream: Stream) -> "_Arrivals":
        if stream not in self._streams:
            self._streams[stream] = _Arrivals(
                stream, self._publishing, self._index, self._holders, self._upstream, self._threads
            )
            self._works[stream] = self._group.create_task(self._streams[stream].work())
        return self._streams[stream]

    async def _follow(self) -> None:
        waits = pauses()
        while True:
            try:
                async for info in self._upstream.watch():
                    waits = pauses()
                    if (not self._runs or info.run_id in self._runs) and info.run_id not in self._ended:
                        self._arrivals((info.run_id, info.version.policy)).heard(info.version.version)
            except Unauthenticated as error:
                remedy = "set upstream_security's token, or its token_file, to the upstream's"
                log.warning("upstream lost", target=self._upstream.target, reason=str(error), remedy=remedy)
            except EbbtideError as error:
                log.warning("upstream lost", target=self._upstream.target, reason=str(error))
            await asyncio.sleep(next(waits))

    async def _tell(self) -> None:
        """Other readers of the upstream may be sent here for what is here whole."""
        while True:
            await asyncio.sleep(AGAIN_S * 0.8)
            for stream in list(self._streams):
                newest = max(self._index.whole(stream), default=0)
                if newest:
                    with suppress(EbbtideError):  # it is told again soon
                        await self._upstream.tell(stream, newest)


class _Arrivals:
    """The arrivals of one stream, one after another."""

    def __init__(
        self,
        stream: Stream,
        publishing: VersionIntake,
        index: VersionIndex,
        holders: HolderTable,
        upstream: Upstream,
        threads: DigestThreads,
    ) -> None:
        self._stream, self._publishing, self._index = stream, publishing, index
        self._holders, self._upstream, self._threads = holders, upstream, threads
        self.newest, self._heard_at = 0, 0.0
        self._asked: dict[int, asyncio.Future[None]] = {}  # in the order of their turns
        self._askers: Counter[int] = Counter()  # how many wait for each
        self._turn_of_newest = False
        self._changed = asyncio.Event()
        self._coming = 0  # what `_bring` is at
        self._no_room: NoCapacity | None = None  # why that could not even begin
        self._readable: frozenset[int] = frozenset()  # on their way now
        self._spared_until = 0.0  # what is on its way

    def heard(self, version: int) -> None:
        """The upstream has this version."""
        if version > self.newest:
            self.newest, self._heard_at = version, time.monotonic()
            self._changed.set()

    def expects(self, version: int) -> bool:
        """Whether the upstream is known to have had this version lately."""
        return bool(version) and (version == self.newest or version in self._asked or version in self._readable)

    async def ask(self, version: int) -> None:
        """Return when the version can be read here. Raises what keeps it away."""
        if version in self._readable:
            self._spared_until = time.monotonic() + _GRACE_S
            return
        if self._no_room is not None and version == self._coming:
            raise self._no_room
        if version not in self._asked:
            self._asked[version] = asyncio.get_running_loop().create_future()
            self._changed.set()
        self._askers[version] += 1
        try:
            await asyncio.shield(self._asked[version])
        finally:
            self._askers[version] -= 1
            if not self._askers[version]:
                self._forget(version)

    def _forget(self, version: int) -> None:
        """Nobody waits for the version any more; but one who was told to ask again is to find what has come of it."""
        del self._askers[version]
        if self._asked.pop(version, None) is not None and version == self._coming:
            self._spared_until = time.monotonic() + _GRACE_S
        self._changed.set()

    async def work(self) -> None:
        """For ever: bring what is wanted."""
        while True:
            self._changed.clear()
            held = self._index.stream(self._stream)
            self._answer(held)
            if version := self._next(max(held, default=0)):
                await self._bring(version)
            else:
                await self._changed.wait()

    def _next(self, newest_here: int) -> int:
        """What has been asked for longest, and the newest, in turns; 0: nothing is wanted."""
        asked = next(iter(self._asked), 0)
        # An upstream lists its older versions too; of those only what is asked for is brought.
        newer = self.newest if self.newest > newest_here else 0
        version = newer if newer and (self._turn_of_newest or not asked) else asked
        self._turn_of_newest = version != newer
        return version

    async def _bring(self, version: int) -> None:
        """Bring one version, until it is here, cannot be had, or is outdated."""
        self._spared_until, self._coming = 0.0, version
        arrival = VersionArrival(
            self._publishing,
            self._index,
            self._upstream,
            self._stream,
            version,
            began=self._began,
            threads=self._threads,
        )
        task = asyncio.create_task(self._persist(arrival))
        outcome = "given_up"
        try:
            while not task.done() and not self._outdated(version):
                await self._news(task)
            if task.done():
                outcome = task.result()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await arrival.close()
            self._readable, self._coming, self._no_room = frozenset(), 0, None
        metrics.ARRIVALS.labels(outcome).inc()
        if outcome == "committed" and version == self.newest:
            metrics.ARRIVAL_SECONDS.observe(time.monotonic() - self._heard_at)
        log.info("arrival ended", run_id=self._stream[0], policy=self._stream[1], version=version, outcome=outcome)

    async def _news(self, task: asyncio.Task[str]) -> None:
        """Wait until the arrival has ended, another version is heard of or asked for, or a reader may have gone."""
        self._changed.clear()
        changed = asyncio.create_task(self._changed.wait())
        await asyncio.wait({task, changed}, timeout=_LOOK_S, return_when=asyncio.FIRST_COMPLETED)
        changed.cancel()

    async def _persist(self, arrival: VersionArrival) -> str:
        """Go on after whatever may pass; tell what was not to be had to those who asked."""
        waits = pauses()
        while True:
            try:
                await arrival.run()
            except (Unavailable, ChunkCorrupt, NoCapacity, Internal) as error:
                if isinstance(error, NoCapacity) and not self._readable:
                    self._no_room = error
                    self._tell(arrival.version, error)
                    if arrival.version != self.newest:
                        return "refused"
                wait = max(next(waits), error.retry_after_s if isinstance(error, NoCapacity) else 0.0)
                log.info("arrival broken", version=arrival.version, reason=str(error), again_s=wait)
                await asyncio.sleep(wait)
            except EbbtideError as error:
                self._refuse(arrival.version, error)
                return "refused"
            else:
                return "committed"

    def _refuse(self, version: int, error: EbbtideError) -> None:
        log.error("version not taken from upstream", stream=self._stream, version=version, reason=str(error))
        if version == self.newest:
            self.newest = 0  # until it, or a newer one, is heard of again
        self._tell(version, error)

    def _tell(self, version: int, error: EbbtideError) -> None:
        if waiting := self._asked.pop(version, None):
            waiting.set_exception(error)
            waiting.exception()  # those who waited may have gone

    async def _began(self, versions: frozenset[int]) -> None:
        """These can be read now. What else is staged and nobody reads was given up, and has given what it could."""
        self._readable, self._no_room = versions, None
        if versions & self._asked.keys():
            self._spared_until = time.monotonic() + _GRACE_S
        self._answer(versions)
        for stage in self._index.stages:
            outdated = stage.arriving and stage.stream == self._stream and stage.number not in versions
            if outdated and not self._holders.fetching(self._stream, stage.number):
                await self._publishing.abandon(*self._stream, stage.number)

    def _answer(self, versions: Container[int]) -> None:
        for version in [version for version in self._asked if version in versions]:
            self._asked.pop(version).set_result(None)

    def _outdated(self, version: int) -> bool:
        if self._no_room is not None:
            return version < self.newest or bool(self._asked)
        wanted = version in self._asked or time.monotonic() < self._spared_until
        return version < self.newest and not wanted and not self._holders.fetching(self._stream, version)
