"""Joins the shares of all ranks on rank 0, then seals, signs, stages and commits the version."""

import asyncio
import os
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Final, TypeVar

from msgspec import Struct

from ebbtide.client.publisher.rank_exchange import RankEnd, RankFailure, RankPut, RankShare, RankWanted
from ebbtide.client.publisher.version_staging import VersionStaging
from ebbtide.errors import EbbtideError, Internal, NoCapacity, NotReady, Unavailable
from ebbtide.rpc.backoff import pauses
from ebbtide.types.weights import KEY_BYTES, Manifest, Patch, PolicyVersion, TensorEntry, TensorPatch
from ebbtide.weights import Signer, read_missing, same_geometry, seal_manifest, seal_patch, staged_sizes
from ebbtide.weights.version_encoding import Encoded

T = TypeVar("T")

#: A patch of more than this share of the dense version is published as an anchor, which needs no base.
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
