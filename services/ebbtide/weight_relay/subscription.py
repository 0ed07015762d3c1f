"""Brings versions here from the upstream: the newest one of every policy, and any that a reader asks for.

Invariant: one version of each stream arrives at a time, so that no blob crosses the link twice. Only `_Arrivals.work`
starts and ends arrivals. A requested version takes turns with the newest while a reader waits for it; one without room
is refused to its readers and holds up nothing else. An older arrival is given up once it has no readers; its blobs go
only after the next has begun, which may want them too. All of this is in memory: a restarted relay hears of the
versions again, and finds on disk the blobs that came.

Readers of an arriving version see only what was checked: the manifest by its root and signature, each blob by its
digest. Progress lies in the relay's stages and on its disk alone. So an arrival that breaks, or whose process dies,
starts again and asks for the rest. `Upstream` calls the relay that this relay follows, and checks every answer.
"""

import asyncio
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Container, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import chain
from typing import Final, Protocol, TypeAlias

from ebbtide import telemetry
from ebbtide.auth.security import ClientSecurity
from ebbtide.errors import (
    ChunkCorrupt,
    EbbtideError,
    Internal,
    InvalidRequest,
    NoCapacity,
    NotReady,
    Unauthenticated,
    Unavailable,
    VersionUnavailable,
)
from ebbtide.rpc.backoff import pauses
from ebbtide.rpc.channel import open_channel
from ebbtide.rpc.status_table import translated
from ebbtide.transfer import GrpcSource, opener
from ebbtide.transfer.blob_fetcher import BlobBatch, BlobFetcher, FetchMeans
from ebbtide.transfer.digest_threads import DigestThreads
from ebbtide.transfer.sources import UNLISTED, OpenSource, SourcePool
from ebbtide.transfer.version_finder import FoundVersion, PathLists, PathRequest, VersionFinder, is_usable
from ebbtide.types.weights import TILE_BYTES, FetchPath, Holder, Manifest, Patch, VersionInfo
from ebbtide.v1 import weights_pb2 as pb
from ebbtide.v1.weights_pb2_grpc import WeightsStub
from ebbtide.weight_relay import metrics
from ebbtide.weight_relay.holder_table import AGAIN_S, LOST_S, HolderTable
from ebbtide.weight_relay.intake.version_intake import VersionIntake
from ebbtide.weight_relay.library.run_ends import EndedRuns
from ebbtide.weight_relay.library.version_index import VersionIndex
from ebbtide.weight_relay.retention import Stream
from ebbtide.weights import ManifestLimits
from ebbtide.wire import from_proto


class Upstream(Protocol):
    """A relay or a static copy that is followed. All calls raise the service's errors."""

    target: str

    async def close(self) -> None: ...

    def pool(self) -> SourcePool:
        """Sources of blobs, the upstream the last of them. The caller closes the pool."""
        ...

    def watch(self) -> AsyncIterator[VersionInfo]:
        """Yield the versions that the upstream holds, of all runs, then each new one."""
        ...

    async def find(self, request: PathRequest) -> FoundVersion:
        """Ways and sources. The upstream hears that this relay wants the version, or has it (`done`)."""
        ...

    async def manifest(self, stream: Stream, version: int) -> Manifest:
        """The manifest of a version (0: the newest), checked but for its signature."""
        ...

    async def way(self, found: FetchPath, target: Manifest) -> PathLists:
        """The manifests and patches of a way, checked but for their signatures."""
        ...


class RelayUpstream:
    """The relay at `target`, called by `holder`; an `Upstream`."""

    def __init__(self, target: str, security: ClientSecurity, holder: Holder, limits: ManifestLimits) -> None:
        self.target, self._holder, self._limits = target, holder, limits
        self._channel, self._open_source = open_channel(target, security), opener(security)
        self._stub = WeightsStub(self._channel)
        self._finder = VersionFinder(self._stub, target, lambda: holder)

    async def close(self) -> None:
        await self._channel.close()

    def pool(self) -> SourcePool:
        itself = OpenSource(GrpcSource(self._stub, self.target, self._holder), "upstream", self.target, UNLISTED)
        return SourcePool(itself, self._open_source, self._holder)

    async def watch(self) -> AsyncIterator[VersionInfo]:
        call = self._stub.WatchVersions(pb.WatchVersionsRequest())
        try:
            with translated("upstream relay", self.target):
                async for message in call:
                    yield from_proto(message, VersionInfo)
        finally:
            call.cancel()

    async def find(self, request: PathRequest) -> FoundVersion:
        return await self._finder.find(request)

    async def manifest(self, stream: Stream, version: int) -> Manifest:
        return await self._finder.manifest(*stream, version, limits=self._limits)

    async def way(self, found: FetchPath, target: Manifest) -> PathLists:
        return await self._finder.way(found, target)


def best_path(found: FoundVersion, have: Sequence[int]) -> FetchPath:
    """The cheapest usable way. Raises `VersionUnavailable` if there is none."""
    for way in found.ways:
        if is_usable(way, have):
            return way
    raise VersionUnavailable("the upstream relay knows no way to the version")


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
#: Blobs of one call.
_MOST: Final = 64

Began: TypeAlias = Callable[[frozenset[int]], Awaitable[None]]
#: A version to stage, and the patch that leads to it from the step before; None: all its dense tiles.
ArrivalStep: TypeAlias = tuple[Manifest, Patch | None]


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
        request = PathRequest(run_id=stream[0], policy=stream[1], version=version, have=have)
        way = best_path(await self._upstream.find(request), have)
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
                request = PathRequest(run_id=stream[0], policy=stream[1], version=newest, have=(newest,), done=True)
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

    async def _persist(self, arrival: "VersionArrival") -> str:
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


class VersionArrival:
    """Brings `version` of `stream`."""

    def __init__(
        self,
        intake: VersionIntake,
        index: VersionIndex,
        upstream: Upstream,
        stream: Stream,
        version: int,
        *,
        began: Began,
        means: FetchMeans,
    ) -> None:
        """`began` gets the versions on their way once they can be read."""
        self.stream, self.version = stream, version
        self._intake, self._index, self._upstream = intake, index, upstream
        self._began, self._means = began, means
        self._pool = upstream.pool()
        self._known: dict[tuple[FetchPath, bool], list[ArrivalStep]] = {}
        self._have: tuple[int, ...] = ()
        self._scratch = False

    async def close(self) -> None:
        await self._pool.close()

    async def run(self) -> None:
        """Go on from what is here until the version is committed. Raises what broke it.

        `VersionUnavailable`: the upstream does not have it. After `Unavailable`, `ChunkCorrupt`, `NoCapacity` and
        `Internal` call it again: it passes over sources that broke.
        """
        self._have = tuple(sorted(self._index.whole(self.stream)))
        found = await self._find()
        steps = await self._steps(best_path(found, self._have))
        try:
            missing = [await self._intake.begin(*step, arriving=True) for step in steps]
        except NotReady as error:
            self._scratch = True
            raise Unavailable(f"a base was dropped meanwhile, so come from a keyframe ({error})") from None
        await self._began(frozenset(manifest.version.version for manifest, _ in steps))
        sink = StageSink(self._intake, list(zip(steps, missing, strict=True)))
        await sink.commit()
        batches = _batches(chain.from_iterable(missing), self._means.streams)
        fetcher = BlobFetcher(batches, sink.take, self._pool, self._means, exhausted=_exhausted, on_fault=_count_fault)
        await fetcher.run(self._find, found.again_s)
        with suppress(EbbtideError):  # the upstream hears of it again
            await self._upstream.find(self._request(done=True))

    def _request(self, *, done: bool = False) -> PathRequest:
        return PathRequest(
            run_id=self.stream[0],
            policy=self.stream[1],
            version=self.version,
            have=(self.version,) if done else self._have,
            failed=() if done else self._pool.failed,
            done=done,
            scratch=self._scratch and not done,
        )

    async def _find(self) -> FoundVersion:
        return await self._pool.ask(lambda: self._upstream.find(self._request()))

    async def _steps(self, found: FetchPath) -> list[ArrivalStep]:
        """The manifests and patches of a way, fetched once. They are few bytes beside its blobs."""
        dense = found.start not in self._have
        if (found, dense) not in self._known:
            try:
                target = await self._upstream.manifest(self.stream, self.version)
                manifests, patches = await self._upstream.way(found, target)
            except NotReady as error:
                raise Unavailable(f"the way was dropped meanwhile; ask for another ({error})") from None
            steps: list[ArrivalStep] = list(zip(manifests, (None, *patches), strict=True))
            self._known[found, dense] = steps if dense else steps[1:]
        return self._known[found, dense]


class StageSink:
    """Fills stages with the blobs that a `BlobFetcher` hands over. Commits each version once it is whole, in order:
    each is the base of the next."""

    def __init__(self, intake: VersionIntake, steps: Sequence[tuple[ArrivalStep, Sequence[bytes]]]) -> None:
        """`steps`: staged versions, each with the blobs that it lacks."""
        self._intake = intake
        self._stages = deque((manifest, set(digests)) for (manifest, _), digests in steps)
        self._committing = asyncio.Lock()

    async def take(self, _batch: BlobBatch, blobs: dict[bytes, bytes], _source: str) -> None:
        """Raises the relay's errors; `Unavailable` if a stage, or the base of a patch, is gone."""
        for digest, data in blobs.items():
            try:
                await self._intake.put(digest, data, verified=True)
            except InvalidRequest as error:
                if error.field != "digest":
                    raise
                raise Unavailable(f"the stage has gone meanwhile ({error})") from None
            for _, lacking in self._stages:
                lacking.discard(digest)
        await self.commit()

    async def commit(self) -> None:
        """Commit the versions that are whole."""
        if self._committing.locked():
            return  # the call that has the lock looks at the next version, too
        async with self._committing:
            while self._stages and not self._stages[0][1]:
                manifest = self._stages[0][0]
                try:
                    await self._intake.commit(manifest.run_id, manifest.version)
                except NotReady as error:  # its base, or a damaged blob, is gone
                    raise Unavailable(str(error)) from None
                self._stages.popleft()


def _batches(digests: Iterable[bytes], streams: int) -> Iterator[BlobBatch]:
    """Split blobs into calls, small enough that all streams share the work until the end."""
    wanted = list(dict.fromkeys(digests))
    size = min(_MOST, max(1, len(wanted) // (2 * streams)))
    for start in range(0, len(wanted), size):
        yield BlobBatch(dict.fromkeys(wanted[start : start + size], TILE_BYTES))


def _exhausted(error: EbbtideError) -> EbbtideError:
    """An error of the sources says nothing about the version."""
    if isinstance(error, NoCapacity):
        return error
    return Unavailable(f"no source is left; ask for others, or another way ({error})")


def _count_fault(error: EbbtideError) -> None:
    metrics.UPSTREAM_FAILURES.labels(type(error).__name__).inc()
