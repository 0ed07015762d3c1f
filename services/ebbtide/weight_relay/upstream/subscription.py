"""Brings versions here from the upstream: the newest one of every policy, and any that a reader asks for.

Invariant: one version of each stream arrives at a time, so that no blob crosses the link twice. Only `_Arrivals.work`
starts and ends arrivals. A requested version takes turns with the newest while a reader waits for it; one without room
is refused to its readers and holds up nothing else. An older arrival is given up once it has no readers; its blobs go
only after the next has begun, which may want them too. All of this is in memory: a restarted relay hears of the
versions again, and finds on disk the blobs that came.
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
from ebbtide.scheduling.distribution.retained_bytes import Stream
from ebbtide.transfer.blob_fetcher import FetchMeans
from ebbtide.transfer.mirror.digest_threads import DigestThreads
from ebbtide.transfer.version_finder import WayRequest
from ebbtide.weight_relay import metrics
from ebbtide.weight_relay.intake.version_intake import VersionIntake
from ebbtide.weight_relay.library.ended_runs import EndedRuns
from ebbtide.weight_relay.library.version_index import VersionIndex
from ebbtide.weight_relay.outlets.holder_table import AGAIN_S, LOST_S, HolderTable
from ebbtide.weight_relay.upstream.relay_upstream import Upstream, best_way
from ebbtide.weight_relay.upstream.version_arrival import VersionArrival

log = telemetry.get_logger(__name__)

#: How long a request waits until a version begins to arrive; well within a unary call's deadline.
PATIENCE_S: Final = 10.0
#: How often an outdated arrival is checked for readers.
_LOOK_S: Final = 0.2
#: Time in which a requester becomes a reader. The arrival is not given up before.
_GRACE_S: Final = LOST_S
#: Calls for blobs at once, so that a long link stays full while one call ends and the next begins.
_CALLS: Final = 4
#: For how long a source may send nothing, besides the length of its pauses so far.
_SILENCE_S: Final = 10.0


class Subscription:
    def __init__(
        self,
        intake: VersionIntake,
        index: VersionIndex,
        ended: EndedRuns,
        holders: HolderTable,
        upstream: Upstream,
        runs: Collection[str] = (),
        *,
        patience_s: float = PATIENCE_S,
    ) -> None:
        """`runs`: the runs to follow; none: all. `patience_s`: how long `ask` waits."""
        self._intake, self._index, self._ended = intake, index, ended
        self._holders, self._upstream, self._runs = holders, upstream, runs
        self._patience_s = patience_s
        self._streams: dict[Stream, _Arrivals] = {}
        self._works: dict[Stream, asyncio.Task[None]] = {}
        self._group = asyncio.TaskGroup()
        # Readers wait for each blob: it is handed over at once.
        self._means = FetchMeans(threads=DigestThreads(), streams=_CALLS, silence_s=_SILENCE_S, hand_over_blobs=1)

    async def run(self) -> None:
        """Follow the upstream for ever, and report to it what is here."""
        try:
            async with self._group:
                self._group.create_task(self._follow())
                self._group.create_task(self._tell())
        finally:
            self._means.threads.close()

    async def ask(self, run_id: str, policy: str, version: int) -> int:
        """Bring `version` (0: the newest) unless it is here or arriving. Returns its number once it can be read.

        Raises the upstream's error, `NoCapacity` if it does not fit here, and `Unavailable` after the patience.
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
        """End the arrivals of a run that has ended."""
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
        have = tuple(sorted(self._index.whole(stream)))
        request = WayRequest(run_id=stream[0], policy=stream[1], version=version, have=have)
        way = best_way(await self._upstream.find(request), have)
        return (way.start, *way.via)[-1]

    def _arrivals(self, stream: Stream) -> "_Arrivals":
        if stream not in self._streams:
            self._streams[stream] = _Arrivals(
                stream, self._intake, self._index, self._holders, self._upstream, self._means
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
        """Report whole versions, so that the upstream may send its readers here."""
        while True:
            await asyncio.sleep(AGAIN_S * 0.8)
            for stream in list(self._streams):
                newest = max(self._index.whole(stream), default=0)
                request = WayRequest(run_id=stream[0], policy=stream[1], version=newest, have=(newest,), done=True)
                if newest:
                    with suppress(EbbtideError):  # the next report comes soon
                        await self._upstream.find(request)


class _Arrivals:
    """The arrivals of one stream, one after another."""

    def __init__(
        self,
        stream: Stream,
        intake: VersionIntake,
        index: VersionIndex,
        holders: HolderTable,
        upstream: Upstream,
        means: FetchMeans,
    ) -> None:
        self._stream, self._intake, self._index = stream, intake, index
        self._holders, self._upstream, self._means = holders, upstream, means
        self.newest, self._heard_at = 0, 0.0
        self._asked: dict[int, asyncio.Future[None]] = {}  # in the order of their turns
        self._askers: Counter[int] = Counter()  # how many wait for each
        self._turn_of_newest = False
        self._changed = asyncio.Event()
        self._coming = 0  # the version that `_bring` brings
        self._no_room: NoCapacity | None = None  # why it could not begin
        self._readable: frozenset[int] = frozenset()  # versions on their way now
        self._spared_until = 0.0  # when they may be given up

    def heard(self, version: int) -> None:
        """The upstream has this version."""
        if version > self.newest:
            self.newest, self._heard_at = version, time.monotonic()
            self._changed.set()

    def expects(self, version: int) -> bool:
        """Whether the upstream is known to have this version."""
        return bool(version) and (version == self.newest or version in self._asked or version in self._readable)

    async def ask(self, version: int) -> None:
        """Return when the version can be read here. Raises why it cannot come."""
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
        """No request waits for the version any more. It is spared for a while, for readers that ask again."""
        del self._askers[version]
        if self._asked.pop(version, None) is not None and version == self._coming:
            self._spared_until = time.monotonic() + _GRACE_S
        self._changed.set()

    async def work(self) -> None:
        """Bring the wanted versions, for ever."""
        while True:
            self._changed.clear()
            held = self._index.stream(self._stream)
            self._answer(held)
            if version := self._next(max(held, default=0)):
                await self._bring(version)
            else:
                await self._changed.wait()

    def _next(self, newest_here: int) -> int:
        """The version requested longest ago, and the newest, in turns; 0: none is wanted."""
        asked = next(iter(self._asked), 0)
        # An upstream lists its older versions too; these come only on request.
        newer = self.newest if self.newest > newest_here else 0
        version = newer if newer and (self._turn_of_newest or not asked) else asked
        self._turn_of_newest = version != newer
        return version

    async def _bring(self, version: int) -> None:
        """Bring one version until it is here, is refused, or is outdated."""
        self._spared_until, self._coming = 0.0, version
        arrival = VersionArrival(
            self._intake,
            self._index,
            self._upstream,
            self._stream,
            version,
            began=self._began,
            means=self._means,
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
        """Wait until the arrival ends, another version is wanted, or it is time to look for readers."""
        self._changed.clear()
        changed = asyncio.create_task(self._changed.wait())
        await asyncio.wait({task, changed}, timeout=_LOOK_S, return_when=asyncio.FIRST_COMPLETED)
        changed.cancel()

    async def _persist(self, arrival: VersionArrival) -> str:
        """Go on after errors that may pass. Refuse the version to its requesters after any other."""
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
            waiting.exception()  # the requesters may have gone

    async def _began(self, versions: frozenset[int]) -> None:
        """These versions can be read now. Stages without readers, of arrivals given up, are of no more use."""
        self._readable, self._no_room = versions, None
        if versions & self._asked.keys():
            self._spared_until = time.monotonic() + _GRACE_S
        self._answer(versions)
        for stage in self._index.stages:
            outdated = stage.arriving and stage.stream == self._stream and stage.number not in versions
            if outdated and not self._holders.fetching(self._stream, stage.number):
                await self._intake.abandon(*self._stream, stage.number)

    def _answer(self, versions: Container[int]) -> None:
        for version in [version for version in self._asked if version in versions]:
            self._asked.pop(version).set_result(None)

    def _outdated(self, version: int) -> bool:
        if self._no_room is not None:
            return version < self.newest or bool(self._asked)
        wanted = version in self._asked or time.monotonic() < self._spared_until
        return version < self.newest and not wanted and not self._holders.fetching(self._stream, version)
