"""Publishes policy versions at a weight-relay: copies the tensors, and does the rest while the trainer continues.

A version is compared bit by bit with the one before. Only the changes are sent if the relay still has that one,
otherwise everything.
"""

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable, Generator
from dataclasses import dataclass
from typing import Any, Final, Literal

from msgspec import Struct

from ebbtide.client.publisher.rank_exchange import RankExchange, RankStart, SingleRank
from ebbtide.client.publisher.tensor_snapshots import Tensors, TensorSnapshot
from ebbtide.client.publisher.version_upload import (
    UploadBase,
    UploadResult,
    VersionAssembler,
    VersionStaging,
    VersionUpload,
)
from ebbtide.client.service_peer import ServicePeer
from ebbtide.errors import NotReady
from ebbtide.types.weights import PolicyVersion
from ebbtide.weights.patch import warm_up
from ebbtide.weights.version_encoding import Described

__all__ = ["Authority", "PublishReport", "Publisher", "Publishing", "Tensors"]


log = logging.getLogger(__name__)

#: For telling the other ranks that a version is abandoned, before this rank leaves them.
_TELL_S: Final = 1.0


@dataclass(frozen=True)
class Authority:
    """The right of a lease to give a policy its next version."""

    #: Returns a version number and the seed of the run's key (empty: the run has no key).
    reserve: Callable[[], Awaitable[tuple[int, bytes]]]
    #: Makes a version that the relay holds the newest.
    announce: Callable[[PolicyVersion], Awaitable[None]]


class PublishReport(Struct, frozen=True, kw_only=True):
    """The figures of a published version: bytes and elements of all ranks, seconds of this one."""

    version: PolicyVersion
    kind: Literal["patch", "keyframe"]
    base: int  # the version that the patch changes; 0: a keyframe
    bytes_sent: int
    dense_bytes: int
    density: float  # share of elements that changed; 1 without a base
    pause_s: float  # for the snapshot, during which the tensors must not change
    encode_s: float
    upload_s: float  # up to the version's announcement


class Publishing:
    """A version in progress whose tensors can change again. Await it for the announced version or the error;
    cancelling the waiting task cancels it too.
    """

    def __init__(self, task: asyncio.Future[PublishReport], number: int, pause_s: float) -> None:
        #: `number`: the version's; 0: only rank 0 knows it.
        self._task, self.number, self.pause_s = task, number, pause_s

    def cancel(self) -> None:
        """Abandon the version, on all ranks, unless it is announced already."""
        self._task.cancel()

    def __await__(self) -> Generator[Any, None, PolicyVersion]:
        return (yield from self._task.__await__()).version

    @property
    def done(self) -> bool:
        return self._task.done()

    @property
    def report(self) -> PublishReport:
        """Raises `NotReady` before the version is announced, and the error if it failed."""
        if not self._task.done():
            raise NotReady(f"version {self.number} is still on its way; await it first")
        return self._task.result()


class Publisher:
    """Publishes one policy of a run, one version after another.

    Invariant: `_base` is the last version that the relay confirmed, and `_shadow` holds its bits; `_spare` is the
    memory for the next one and has no other user. A failed version does not change `_base`. The task `_last` completes
    each version's exchanges with the other ranks, even if the caller is cancelled. A closed publisher holds no weights.
    When the process dies, the next publisher has no base and begins with a keyframe.
    """

    def __init__(
        self,
        peer: ServicePeer,
        run_id: str,
        policy: str,
        *,
        authority: Authority | None,
        exchange: RankExchange | None = None,
        config: bytes = b"",
        threads: int = 0,
        forget: "Callable[[Publisher], None] | None" = None,
    ) -> None:
        """Take rank 0's `authority` and `config`, the model's config.json, which travels with each version so that
        workers can start an engine for it. Without one, only workers whose model has just these tensors can serve the
        run. `threads` encode (0: half of the processors, at most eight). `forget` is called with this once closed.
        """
        self._config = config
        self._staging = VersionStaging(peer, run_id)
        self._run_id, self._policy = run_id, policy
        self._authority, self.exchange = authority, exchange or SingleRank()
        self._forget = forget
        self._threads = threads or max(1, min(8, (os.cpu_count() or 2) // 2))
        self._base: UploadBase | None = None
        self._shadow, self._spare = TensorSnapshot(), TensorSnapshot()
        self._order = asyncio.Lock()
        self._begun, self._closed = 0, False
        self._last: asyncio.Task[PublishReport] | None = None
        self._way: asyncio.Future[PublishReport] | None = None  # `_last`, or its shield, which is cancelled instead
        self._readiness: asyncio.Task[None] | None = None
        self._room = asyncio.Event()  # clear while a thread prepares the memory for the next version
        self._room.set()

    async def publish(self, tensors: Tensors, *, step: int = 0, parent: int = 0) -> Publishing:
        """Begin to publish `tensors`, which must not change before this returns. Waits for the version before.
        A `TensorKeeper` (`ebbtide.client.publisher.tensor_snapshots`) compares tensors where they lie.

        All ranks call it with their own tensors; `step` and `parent` are rank 0's. Raises `NotReady` once closed,
        `InvalidRequest` naming the tensor, and `LeaseSuperseded`; with several ranks, awaiting the version raises the
        latter two. Once cancelled, returns when no thread reads `tensors`.
        """
        copied = asyncio.Event()
        if self.exchange.size == 1:
            return await self._begin(tensors, step, parent, copied)
        beginning = asyncio.create_task(self._begin(tensors, step, parent, copied), name="beginning")
        beginning.add_done_callback(lambda _: copied.set())
        try:
            return await asyncio.shield(beginning)
        except asyncio.CancelledError:
            beginning.add_done_callback(_give_up)  # the other ranks have begun the version, or will begin it
            await copied.wait()
            raise

    async def aclose(self, within_s: float = 0.0) -> None:
        """Wait for the unfinished version, and abandon it after `within_s` seconds. Frees the copies of weights; no
        version can follow.
        """
        self._closed = True
        last, way = self._last, self._way
        if last is not None and way is not None and not last.done():
            await asyncio.wait({last}, timeout=within_s)
            way.cancel()
            await asyncio.wait({last}, timeout=_TELL_S)
            last.cancel()
            await asyncio.wait({last})
        self._let_go()
        if self._forget is not None:
            self._forget(self)

    def _let_go(self) -> None:
        self._base, self._shadow, self._spare = None, TensorSnapshot(), TensorSnapshot()
        self._last = self._way = None  # the error of a failed version holds its snapshot

    async def _begin(self, tensors: Tensors, step: int, parent: int, copied: asyncio.Event) -> Publishing:
        async with self._order:
            if self._last is not None:
                await asyncio.wait({self._last})
            await self._room.wait()
            if self._closed:
                raise NotReady("this publisher is closed; make another")
            self._begun += 1
            snapshot, self._spare = self._spare, TensorSnapshot()  # a cancelled snapshot is half written: not for reuse
            snapshot.follow(self._shadow.give_up())
            began = time.monotonic()
            taking = asyncio.ensure_future(
                asyncio.to_thread(snapshot.take, tensors, first=self.exchange.rank == 0),
            )
            taking.add_done_callback(lambda _: copied.set())
            try:
                taken, reserved = await asyncio.gather(
                    asyncio.shield(taking), self._reserve(step, parent), return_exceptions=True
                )
            finally:  # a cancelled caller may free the tensors, which a thread reads
                await asyncio.wait({taking})
            pause_s = time.monotonic() - began
            failure = next((one for one in (reserved, taken) if isinstance(one, BaseException)), None)
            if failure is not None and (self.exchange.size == 1 or not isinstance(failure, Exception)):
                self._spare = snapshot
                raise failure
            start, head = RankStart(), None
            if failure is None and not isinstance(reserved, BaseException):
                start, head = self._head(reserved)
            upload = VersionUpload(self._staging, self.exchange, self._threads, self._begun, start, head, failure)
            return self._start(upload, snapshot, pause_s)

    def _start(self, upload: VersionUpload, snapshot: TensorSnapshot, pause_s: float) -> Publishing:
        number = upload.start.version.version if upload.start.version else 0
        last = asyncio.create_task(self._publish(upload, snapshot, pause_s), name="publishing")
        last.add_done_callback(lambda last: self._ended(last, number))
        self._last = self._way = last
        if self.exchange.size > 1:
            self._way = asyncio.shield(last)
            self._way.add_done_callback(lambda way: upload.give_up() if way.cancelled() else way.exception())
        return Publishing(self._way, number, pause_s)

    def _ended(self, last: asyncio.Task[PublishReport], number: int) -> None:
        if not last.cancelled() and (error := last.exception()) is not None:  # no task may be waiting for it
            log.warning("version %s was not published: %s", number or "of rank 0", error)
        if self._closed:  # during this version's snapshot
            self._let_go()

    async def _reserve(self, step: int, parent: int) -> tuple[PolicyVersion, bytes] | None:
        """Reserve the new version and the key's seed, on rank 0."""
        if self._authority is None:
            return None
        number, seed = await self._authority.reserve()
        return PolicyVersion(policy=self._policy, version=number, parent=parent, step=step), seed

    def _head(self, reserved: tuple[PolicyVersion, bytes] | None) -> tuple[RankStart, VersionAssembler | None]:
        if reserved is None or self._authority is None:
            return RankStart(), None
        version, seed = reserved
        manifest = self._base.manifest if self._base else None
        head = VersionAssembler(
            self._staging, self._run_id, version, seed, manifest, self._authority.announce, self._config
        )
        return RankStart(version=version, base=self._base.version if self._base else 0), head

    async def _publish(self, upload: VersionUpload, snapshot: TensorSnapshot, pause_s: float) -> PublishReport:
        if self._base is None:
            self._room.clear()
            self._readiness = asyncio.create_task(self._get_ready(self._spare, snapshot))
        try:
            made = await upload.make(snapshot, self._base)
        except asyncio.CancelledError:
            self._spare = TensorSnapshot()
            raise
        except Exception:
            self._spare = TensorSnapshot() if upload.given_up else snapshot  # threads can still read the old one
            raise
        if self._base is not None:
            self._spare = self._shadow
        described = Described(snapshot.tensors, made.encoded.entries)
        self._base = UploadBase(made.end.version.version, described, upload.head.manifest if upload.head else None)
        self._shadow = snapshot
        return _report(made, pause_s)

    async def _get_ready(self, spare: TensorSnapshot, snapshot: TensorSnapshot) -> None:
        """Get memory for the next version and compile the kernels, which takes seconds, during the first upload."""
        loop = asyncio.get_running_loop()

        def work() -> None:
            try:
                spare.make_room(snapshot.room)
            finally:
                loop.call_soon_threadsafe(self._room.set)  # only here: the thread has finished writing
            warm_up()

        await asyncio.to_thread(work)


def _give_up(beginning: asyncio.Task[Publishing]) -> None:
    if not beginning.cancelled() and beginning.exception() is None:
        beginning.result().cancel()


def _report(made: UploadResult, pause_s: float) -> PublishReport:
    end = made.end
    return PublishReport(
        version=end.version,
        kind="patch" if end.base else "keyframe",
        base=end.base,
        bytes_sent=end.sent,
        dense_bytes=end.dense,
        density=end.changed / end.elements if end.elements else 0.0,
        pause_s=pause_s,
        encode_s=made.encode_s,
        upload_s=made.upload_s,
    )
