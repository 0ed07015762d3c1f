"""Takes one version from snapshots to the relay: each rank encodes and uploads its share, rank 0 does the rest.

`VersionStaging` stages a version at a weight relay, fills it with the blobs that are missing, and commits it.
`VersionAssembler` joins the shares of all ranks on rank 0, then seals, signs, stages and commits the version.

Invariant: ranks make the same exchanges in the same order: start, shares, then wanted and put blobs as often as needed.
A rank that fails or abandons the version reports it at the next exchange, so that all raise; rank 0 commits only when
the relay lacks nothing. Each message names its version, so ranks notice that they are out of step. When a rank dies,
the others' exchange fails, and the relay drops the stage.
"""

import asyncio
import contextlib
import os
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from typing import Any, Final, TypeVar

import grpc
from msgspec import Struct

from ebbtide.client.publisher.rank_exchange import (
    M,
    RankEnd,
    RankExchange,
    RankFailure,
    RankPut,
    RankShare,
    RankStart,
    RankWanted,
    pack,
    unpack,
)
from ebbtide.client.publisher.tensor_snapshots import TensorSnapshot
from ebbtide.client.service_peer import ServicePeer
from ebbtide.errors import ChunkCorrupt, EbbtideError, Internal, InvalidRequest, NoCapacity, NotReady, Unavailable
from ebbtide.rpc.backoff import pauses
from ebbtide.rpc.channel import write, write_first
from ebbtide.types.weights import KEY_BYTES, Manifest, Patch, PolicyVersion, TensorEntry, TensorPatch
from ebbtide.v1 import types_pb2
from ebbtide.v1 import weights_pb2 as pb
from ebbtide.v1.weights_pb2_grpc import WeightsStub
from ebbtide.weights import (
    ManifestPart,
    Signer,
    read_missing,
    same_geometry,
    seal_manifest,
    seal_patch,
    split_manifest,
    split_patch,
    staged_sizes,
)
from ebbtide.weights.version_encoding import Described, Encoded, Encoding, same_pieces
from ebbtide.wire import from_proto, to_proto

S = TypeVar("S")
R = TypeVar("R")


class VersionStaging:
    """Makes a publisher's calls to the relay. All are idempotent and raise the relay's errors."""

    def __init__(self, peer: ServicePeer, run_id: str) -> None:
        self.peer, self._run_id = peer, run_id
        self._stub = WeightsStub(peer.channel)

    async def begin(self, manifest: Manifest, patch: Patch | None) -> list[bytes]:
        """Stage the version; returns missing blobs, perhaps not all of them, but none only if none is missing."""
        with self.peer.translated():
            answer: pb.BeginPublishResponse = await _send(self._stub.BeginPublish(), _each(_parts(manifest, patch)))
        return list(answer.missing)

    async def put(
        self, version: PolicyVersion, encoding: Encoding, digests: Iterable[bytes], sent: Callable[[int], None]
    ) -> bytes | None:
        """Send blobs of a staged version and wait until all are stored.

        `sent` gets the bytes of each blob handed to the connection. Returns the blobs that the version still lacks
        (`read_missing`); None: the relay does not know.
        """

        async def tiles() -> AsyncGenerator[pb.Tile, None]:
            tile = self._first(version)
            for digest in digests:
                tile.digest, tile.data = digest, await asyncio.to_thread(_blob, encoding, digest)
                yield tile
                sent(len(tile.data))
                tile = pb.Tile()

        with self.peer.translated():
            return _missing(await _send(self._stub.PutTiles(), tiles()))

    async def missing(self, version: PolicyVersion) -> bytes | None:
        """Return the blobs that a staged version still lacks, as `put` does."""
        with self.peer.translated():
            return _missing(await _send(self._stub.PutTiles(), _each([self._first(version)])))

    def _first(self, version: PolicyVersion) -> pb.Tile:
        return pb.Tile(run_id=self._run_id, version=to_proto(version, types_pb2.PolicyVersion))

    async def commit(self, manifest: Manifest) -> PolicyVersion:
        version = to_proto(manifest.version, types_pb2.PolicyVersion)
        request = pb.CommitPublishRequest(run_id=manifest.run_id, version=version)
        with self.peer.translated():
            return from_proto((await self._stub.CommitPublish(request)).version, PolicyVersion)


def _blob(encoding: Encoding, digest: bytes) -> bytes:
    return bytes(encoding.blob(digest))


def _missing(answer: pb.PutTilesResponse) -> bytes | None:
    return answer.missing if answer.HasField("missing") else None


def _parts(manifest: Manifest, patch: Patch | None) -> Iterator[pb.ManifestPart]:
    for part in split_manifest(manifest):
        yield to_proto(part, pb.ManifestPart)
    for patched in split_patch(patch) if patch else ():
        yield to_proto(ManifestPart(patch=patched), pb.ManifestPart)


async def _each(items: Iterable[S]) -> AsyncGenerator[S, None]:
    for item in items:
        yield item


async def _send(call: "grpc.aio.StreamUnaryCall[S, R]", messages: AsyncIterable[S]) -> R:
    """Write all messages and return the answer. gRPC itself would turn an error of `messages` into a cancellation."""
    first = True
    try:
        async for message in messages:
            await (write_first if first else write)(call, message)
            first = False
        await call.done_writing()
    except (asyncio.InvalidStateError, grpc.aio.AioRpcError):
        pass  # the service answered early: the call below returns or raises its answer
    except BaseException:
        call.cancel()
        raise
    return await call


T = TypeVar("T")

#: A patch of more than this share of the dense version is published as a keyframe, which needs no base.
_MAX_PATCH_SHARE: Final = 0.9
#: Tries before it is an error that a relay forgets the stage or refuses blobs.
_ROUNDS: Final = 8
#: How often a blob is put, and reported as missing although the relay has answered that it is stored: then it fails.
_PUTS: Final = 3
#: Signs versions without a key from the coordinator; differs in each process.
_OWN_SEED: Final = os.urandom(KEY_BYTES)


class _Piece(Struct, frozen=True):
    entry: TensorEntry
    patch: TensorPatch


class VersionAssembler:
    """Invariant: `failed` is this rank's own error, set once a `RankWanted` reports it to all."""

    def __init__(
        self,
        staging: VersionStaging,
        run_id: str,
        version: PolicyVersion,
        seed: bytes,
        base: Manifest | None,
        announce: Callable[[PolicyVersion], Awaitable[None]],
        config: bytes = b"",
    ) -> None:
        """Take in `config` the model's config.json if it travels with the version."""
        self._config = config
        self._staging, self._run_id, self._version, self._announce = staging, run_id, version, announce
        self._signer = Signer(seed or _OWN_SEED)
        self._base = base
        self._patch: Patch | None = None
        self._changed = self._elements = self._sent = 0
        self._refusals = 0
        self._asked: tuple[bytes, ...] = ()  # the blobs that the ranks were last asked for
        self._unstored: Counter[bytes] = Counter()  # missing blobs, and how often they were put
        self._pauses, self._give_up = pauses(), 0.0
        self.failed: Exception | None = None
        self.manifest: Manifest | None = None

    async def assemble(self, shares: Sequence[RankShare]) -> RankWanted:
        """Seal and stage the ranks' shares."""
        if failures := [share.failure for share in shares if share.failure]:
            return RankWanted(failure=failures[0])
        encoded = [share.encoded for share in shares if share.encoded]
        if len(encoded) != len(shares):
            return RankWanted(failure=RankFailure.of(Internal("a rank sent neither its share nor a failure")))
        return await self._told(self._assemble(encoded))

    async def go_on(self, puts: Sequence[RankPut]) -> RankWanted:
        """Ask for the blobs that are still missing; if there are none, commit and announce."""
        sent = sum(put.sent for put in puts)
        self._sent += sent
        if failures := [put.failure for put in puts if put.failure]:
            return RankWanted(failure=failures[0])
        return await self._told(self._go_on(puts, sent))

    async def _told(self, work: Awaitable[RankWanted]) -> RankWanted:
        try:
            return await work
        except Exception as error:  # noqa: BLE001 - reported to the other ranks, then raised here
            self.failed = error
            return RankWanted(failure=RankFailure.of(error))

    async def _assemble(self, shares: Sequence[Encoded]) -> RankWanted:
        self.manifest, self._patch = await asyncio.to_thread(self._seal, shares)
        return await self._next()

    def _seal(self, shares: Sequence[Encoded]) -> tuple[Manifest, Patch | None]:
        entries, patches = _joined(shares)
        self._changed = sum(share.changed for share in shares)
        self._elements = sum(share.elements for share in shares)
        manifest = self._signer.sign(seal_manifest(self._run_id, self._version, entries, config=self._config))
        if self._base is None or not same_geometry(manifest, self._base):
            return manifest, None
        patch = Patch(
            run_id=self._run_id,
            base=self._base.version,
            version=manifest.version,
            tensors=patches,
            changed=self._changed,
            elements=self._elements,
        )
        if patch.size > _MAX_PATCH_SHARE * _size(manifest):
            return manifest, None
        return manifest, self._signer.sign_patch(seal_patch(patch))

    async def _go_on(self, puts: Sequence[RankPut], sent: int) -> RankWanted:
        asked = self._asked
        again = [put.again for put in puts if put.again]
        if again:
            await self._wait(again[0].error())
        answers = [put.missing for put in puts if put.sent]
        if again or not answers:
            version = self._sealed().version
            answers = [await self._attempt(lambda: self._staging.missing(version))]
        wanted = await self._next(self._missing(answers))
        if sent and not again:
            self._check_stored(asked, wanted.digests)
        if not (again or sent) and len(wanted.digests) >= len(asked):
            text = f"the relay still lacks {len(wanted.digests)} blobs, and no rank has them; publish again"
            await self._wait(NotReady(text))
        return wanted

    def _check_stored(self, put: Iterable[bytes], missing: Iterable[bytes]) -> None:
        """Raises `Internal` for a blob that the relay has taken `_PUTS` times and still reports as missing."""
        still = set(missing).intersection(put)
        self._unstored = Counter({digest: self._unstored[digest] + 1 for digest in still})
        if lost := [digest.hex()[:16] for digest, puts in self._unstored.items() if puts >= _PUTS]:
            text = f"the relay has taken {len(lost)} blobs {_PUTS} times (such as {min(lost)}) and calls them missing; "
            raise Internal(text + "see its log, and publish again when it keeps what it takes")

    def _missing(self, answers: Sequence[bytes | None]) -> list[bytes] | None:
        """Return the blobs that the relay lacks by its answers; None if an answer does not say."""
        told = [answer for answer in answers if answer is not None]
        if len(told) < len(answers):
            return None
        return read_missing(staged_sizes(self._sealed(), self._patch), told)

    async def _wait(self, error: EbbtideError) -> None:
        """Wait before another try. Raises `error` after too many refusals or too long a time."""
        now = time.monotonic()
        if not isinstance(error, Unavailable | NoCapacity):
            self._refusals += 1
            if self._refusals == _ROUNDS:
                raise error
        if not self._give_up:
            self._pauses, self._give_up = pauses(), now + self._staging.peer.patience_s
        pause = max(next(self._pauses), getattr(error, "retry_after_s", 0.0))
        if now + pause > self._give_up:
            raise error
        await asyncio.sleep(pause)

    async def _next(self, missing: list[bytes] | None = None) -> RankWanted:
        """Return the blobs that the relay lacks, or the version's end. `missing`: by its answers; None: begin again."""
        manifest = self._sealed()
        while True:
            if missing is None:
                missing = await self._begin(manifest)
            if missing:
                if len(missing) < len(self._asked):  # there is progress, however slow
                    self._give_up = 0.0
                self._asked = tuple(missing)
                return RankWanted(digests=self._asked, version=manifest.version)
            try:
                version = await self._attempt(lambda: self._staging.commit(manifest))
                break
            except NotReady as error:  # a relay that restarted in between forgot the stage
                await self._wait(error)
                missing = None
        await self._announce(version)
        return RankWanted(
            end=RankEnd(
                version=version,
                base=self._patch.base.version if self._patch else 0,
                sent=self._sent,
                dense=_size(manifest),
                changed=self._changed,
                elements=self._elements,
            )
        )

    async def _begin(self, manifest: Manifest) -> list[bytes]:
        try:
            return await self._attempt(lambda: self._staging.begin(manifest, self._patch))
        except NotReady:
            if self._patch is None:
                raise
            self._patch = None  # the relay no longer holds the base: publish everything
            return await self._attempt(lambda: self._staging.begin(manifest, None))

    async def _attempt(self, call: Callable[[], Awaitable[T]]) -> T:
        return await self._staging.peer.attempt(call, on=(Unavailable, NoCapacity))

    def _sealed(self) -> Manifest:
        if self.manifest is None:
            raise NotReady("the version is not sealed yet")
        return self.manifest


def _size(manifest: Manifest) -> int:
    return sum(entry.size for entry in manifest.tensors)


def _joined(shares: Iterable[Encoded]) -> tuple[list[TensorEntry], tuple[TensorPatch, ...]]:
    """Join all ranks' entries and patches, ordered by their names' first appearance, then by the pieces' start.

    A piece that several ranks hold, such as replicas outside of their mesh, occurs once.
    """
    found: dict[str, list[_Piece]] = {}
    ranks: dict[TensorEntry, int] = {}
    for rank, share in enumerate(shares):
        for entry, patch in zip(share.entries, share.patches, strict=True):
            pieces = found.setdefault(entry.name, [])
            if ranks.setdefault(entry, rank) == rank:
                pieces.append(_Piece(entry, patch))
    ordered = [piece for pieces in found.values() for piece in sorted(pieces, key=lambda one: one.entry.start)]
    return [piece.entry for piece in ordered], tuple(piece.patch for piece in ordered)


#: Tile patches kept for the upload, as a share of the version's bytes; further ones are encoded again.
_KEPT: Final = 0.04


class UploadBase(Struct, frozen=True):
    """A version that the relay has confirmed, with this rank's bits."""

    version: int
    described: Described
    manifest: Manifest | None = None  # only on rank 0


class UploadResult(Struct, frozen=True, kw_only=True):
    """An announced version."""

    end: RankEnd
    encoded: Encoded
    encode_s: float
    upload_s: float


class VersionUpload:
    """Makes a publisher's `number`th version. Only rank 0 has a `head` and fills `start`; a rank's `failure` ends the
    version on all ranks."""

    def __init__(
        self,
        staging: VersionStaging,
        exchange: RankExchange,
        threads: int,
        number: int,
        start: RankStart,
        head: VersionAssembler | None,
        failure: Exception | None = None,
    ) -> None:
        self._staging, self._exchange, self._threads, self._number = staging, exchange, threads, number
        self.start, self.head, self._failure = start, head, failure
        self._own: asyncio.Future[Any] | None = None  # this rank's work between two exchanges
        self.given_up = False
        self._sent = 0  # bytes, since the last exchange

    def give_up(self) -> None:
        """Stop this rank's work; the exchange continues until all ranks know that the version is abandoned.

        Has no effect once nothing more is asked of this rank.
        """
        self.given_up = True
        self._failure = self._failure or self._gave_up()
        if self._own is not None:
            self._own.cancel()

    async def make(self, snapshot: TensorSnapshot, base: UploadBase | None) -> UploadResult:
        """Make the version from `snapshot`, whose changes are from `base`. Raises this rank's error or another's."""
        start = await self._told(RankStart(failure=RankFailure.of(self._failure)) if self._failure else self.start)
        began = time.monotonic()
        if start.failure is not None:
            raise self._failure or start.failure.error()
        encoding, share = await self._share(snapshot, base if base and base.version == start.base else None)
        encoded = time.monotonic()
        shares = await self._gathered(share)
        wanted = RankWanted()
        if self.head is not None:
            wanted = await self._decided(self.head.assemble(shares))
        while True:
            wanted = await self._told(wanted)
            if wanted.failure is not None:
                raise self._failure or (self.head and self.head.failed) or wanted.failure.error()
            if wanted.end is not None and share.encoded is not None:
                upload_s = time.monotonic() - encoded
                return UploadResult(end=wanted.end, encoded=share.encoded, encode_s=encoded - began, upload_s=upload_s)
            puts = await self._gathered(await self._put(encoding, wanted))
            if self.head is not None:
                wanted = await self._decided(self.head.go_on(puts))

    async def _share(self, snapshot: TensorSnapshot, base: UploadBase | None) -> tuple[Encoding | None, RankShare]:
        try:
            encoding = await self._unless_given_up(self._encode(snapshot, base))
            return encoding, RankShare(encoded=await asyncio.to_thread(encoding.result))
        except Exception as error:  # noqa: BLE001 - reported to the other ranks, then raised here
            self._failure = error
            return None, RankShare(failure=RankFailure.of(error))

    async def _encode(self, snapshot: TensorSnapshot, base: UploadBase | None) -> Encoding:
        found, tensors = await asyncio.to_thread(snapshot.fetch), snapshot.tensors
        known = base.described if base and same_pieces(tensors, base.described.entries) else None
        keep = int(_KEPT * sum(tensor.data.nbytes for tensor in tensors))
        encoding = Encoding(tensors, known, keep_bytes=keep, found=found)
        threads = [asyncio.to_thread(encoding.work) for _ in range(self._threads)]
        try:
            for outcome in await asyncio.gather(*threads, return_exceptions=True):
                if outcome is not None:
                    raise outcome
        finally:
            encoding.stop()
        return encoding

    async def _put(self, encoding: Encoding | None, wanted: RankWanted) -> RankPut:
        self._sent, missing = 0, None
        own = [digest for digest in wanted.digests if encoding.has(digest)] if encoding is not None else []
        try:
            if encoding is not None and wanted.version is not None and own:
                put = self._staging.put(wanted.version, encoding, own, self._count)
                missing = await self._unless_given_up(put)
        except Exception as error:  # noqa: BLE001 - reported to the other ranks, then raised here
            if self._failure is None and _curable(error):
                return RankPut(sent=self._sent, again=RankFailure.of(error))
            self._failure = error
        failure = RankFailure.of(self._failure) if self._failure else None
        return RankPut(sent=self._sent, missing=missing, failure=failure)

    def _count(self, size: int) -> None:
        self._sent += size

    async def _decided(self, work: Coroutine[Any, Any, RankWanted]) -> RankWanted:
        """Return rank 0's wishes; its own failures are part of them."""
        try:
            return await self._unless_given_up(work)
        except Exception as error:  # noqa: BLE001 - reported to the other ranks, then raised here
            return RankWanted(failure=RankFailure.of(error))

    async def _unless_given_up(self, work: Coroutine[Any, Any, T]) -> T:
        """Await `work`. Raises this rank's failure: an earlier one at once, or the one that cancels `work`."""
        if self._failure is not None:
            work.close()
            raise self._failure
        own: asyncio.Future[T] = asyncio.ensure_future(work)
        self._own = own
        try:
            return await own
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not self.given_up or (task is not None and task.cancelling()):
                raise
            raise self._gave_up() from None

    def _gave_up(self) -> Unavailable:
        return Unavailable(f"rank {self._exchange.rank} abandoned the version; publish the next")

    async def _told(self, message: M) -> M:
        """Return rank 0's message; the `message` of other ranks only gives its kind."""
        data = await asyncio.to_thread(lambda: self._exchange.broadcast(pack(self._number, message)))
        return unpack(data, self._number, type(message))

    async def _gathered(self, message: M) -> list[M]:
        """Return, on rank 0, all ranks' messages. If a rank is gone or out of step, tells the others, then raises."""
        try:
            found = await asyncio.to_thread(lambda: self._exchange.gather(pack(self._number, message)))
            return [unpack(data, self._number, type(message)) for data in found]
        except (Unavailable, InvalidRequest) as error:
            if self.head is not None:
                with contextlib.suppress(Unavailable):
                    await self._told(RankWanted(failure=RankFailure.of(error)))
            raise


def _curable(error: Exception) -> bool:
    """Tell whether another try can help."""
    if isinstance(error, InvalidRequest):
        return error.field == "digest"  # the relay forgot the stage
    return isinstance(error, Unavailable | NoCapacity | NotReady | ChunkCorrupt)
