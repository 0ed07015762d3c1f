"""Writes and follows static copies of versions: files that any web server or object store serves by ranges.

    index, NNNNN.blobs  the blobs, as in `ebbtide.transfer.static_source`; patches' blobs before dense tiles
    version-N.msgpack   the manifest of version N, and the patches to it
    versions.msgpack    the list of versions

Invariant: the files that `index` names never change. A further version adds files, then replaces the index at once.
A writer that dies leaves files that nothing names. The copy needs no trust: manifests are signed, and readers check
each blob by its digest.
"""

import asyncio
import os
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO, Final, TypeVar

import aiohttp
import msgspec
from msgspec import Struct

from ebbtide.auth.security import ClientSecurity
from ebbtide.errors import ChunkCorrupt, InvalidRequest, Unavailable, VersionUnavailable
from ebbtide.runtime import fsync
from ebbtide.transfer import opener
from ebbtide.transfer.sources import UNLISTED, OpenSource, SourcePool
from ebbtide.transfer.static_source import StaticSource
from ebbtide.transfer.version_finder import FoundVersion, PathLists, PathRequest
from ebbtide.types.weights import FetchPath, Holder, Manifest, Patch, VersionInfo
from ebbtide.weight_relay.library.version_index import dense_bytes
from ebbtide.weight_relay.retention import Stream
from ebbtide.weight_relay.version_paths import PatchStep, find_paths
from ebbtide.weights import ManifestLimits, blob_sizes, check_manifest, check_patch, check_tile, tile_sizes
from ebbtide.weights.static_index import HEAD, INDEX, RECORD, blobs_file, index_records

T = TypeVar("T")

VERSIONS: Final = "versions.msgpack"
#: Large enough that a policy of any size takes few files, small enough to upload one again after a failure.
FILE_BYTES: Final = 1 << 30
#: Poll interval: a version is minutes old when it has been exported and uploaded.
POLL_S: Final = 10.0
#: Largest file of lists: as many digests as the largest manifest and a patch have.
_MOST_BYTES: Final = 512 << 20
_TIMEOUT: Final = aiohttp.ClientTimeout(total=120.0, sock_connect=10.0, sock_read=30.0)
#: Longest chain of patches that is followed.
_STEPS: Final = 64


def file_of(version: int) -> str:
    """The name of a version's file."""
    return f"version-{version}.msgpack"


class StaticVersion(Struct, frozen=True, kw_only=True):
    """The content of `version-N.msgpack`."""

    manifest: Manifest
    patches: tuple[Patch, ...] = ()
    dense: bool = True  # whether all its dense tiles are there, not only those of the patches

    @property
    def blobs(self) -> dict[bytes, int]:
        """Every blob that it needs and its bytes, in order."""
        sizes: dict[bytes, int] = {}
        for patch in self.patches:
            sizes |= blob_sizes(patch)
        return sizes | tile_sizes(self.manifest) if self.dense else sizes


class StaticCopyWriter:
    """Adds a version to the copy in `folder`, and makes the folder. Raises `InvalidRequest` if it cannot be written."""

    def __init__(self, version: StaticVersion, folder: Path, *, file_bytes: int = FILE_BYTES) -> None:
        self._version, self._sizes = version, version.blobs
        self._folder, self._file_bytes = folder, file_bytes
        self._out: BinaryIO | None = None
        self._offset = 0
        self.written = 0
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._records = _read_index(folder)
            self._number = max((int(path.stem) for path in folder.glob("?????.blobs")), default=-1)
        except (OSError, ValueError, ChunkCorrupt) as error:
            raise _unwritable(folder, error) from None

    @property
    def missing(self) -> list[bytes]:
        """The version's blobs that are not in the copy yet, in order."""
        return [digest for digest in self._sizes if digest not in self._records]

    def add(self, digest: bytes, data: bytes) -> None:
        """Write the next blob. Raises `ChunkCorrupt` for one that does not match its digest."""
        check_tile(digest, data, self._sizes[digest])
        try:
            if self._out is None or self._offset + len(data) > self._file_bytes:
                self.close()
                self._number, self._offset = self._number + 1, 0
                self._out = (self._folder / blobs_file(self._number)).open("xb")
            self._out.write(data)
        except OSError as error:
            raise _unwritable(self._folder, error) from None
        self._records[digest] = (len(data), self._number, self._offset)
        self._offset += len(data)
        self.written += len(data)

    def finish(self) -> None:
        """Publish the version in the copy. Raises `InvalidRequest` while blobs are missing."""
        if missing := self.missing:
            raise InvalidRequest(f"{len(missing)} blobs are missing", field="version")
        records = sorted((digest, *spot) for digest, spot in self._records.items())
        manifest = self._version.manifest
        try:
            self.close()
            self._replace(file_of(manifest.version.version), msgspec.msgpack.encode(self._version))
            self._replace(INDEX, HEAD + b"".join(RECORD.pack(*record) for record in records))
            self._replace(VERSIONS, msgspec.msgpack.encode(_listed(self._folder, manifest)))
        except OSError as error:
            raise _unwritable(self._folder, error) from None

    def close(self) -> None:
        """Close the file being written."""
        if self._out is not None:
            out, self._out = self._out, None
            out.flush()
            os.fsync(out.fileno())
            out.close()

    def _replace(self, name: str, data: bytes) -> None:
        staged = self._folder / f".{name}.{os.getpid()}"
        staged.write_bytes(data)
        fsync(staged)
        staged.replace(self._folder / name)
        fsync(self._folder)


def _read_index(folder: Path) -> dict[bytes, tuple[int, int, int]]:
    """Size, file and offset of each blob in the copy. Raises `ChunkCorrupt` for a malformed index."""
    if not (folder / INDEX).exists():
        return {}
    records = index_records((folder / INDEX).read_bytes())
    return {digest: (size, file, at) for digest, size, file, at in RECORD.iter_unpack(records)}


def _listed(folder: Path, manifest: Manifest) -> list[VersionInfo]:
    """The list of versions, with this one."""
    path = folder / VERSIONS
    before = msgspec.msgpack.decode(path.read_bytes(), type=list[VersionInfo]) if path.exists() else []
    size, tensors = sum(entry.size for entry in manifest.tensors), len(manifest.tensors)
    info = VersionInfo(run_id=manifest.run_id, version=manifest.version, size=size, tensors=tensors)
    return [*(other for other in before if other.version.version != info.version.version), info]


def _unwritable(folder: Path, error: Exception) -> InvalidRequest:
    text = error.strerror if isinstance(error, OSError) and error.strerror else error
    return InvalidRequest(f"{folder} cannot be written ({text}); name another, or remove it", field="folder")


class StaticUpstream:
    """Follows the copy at `url` as if it were a relay; an `Upstream`.

    It polls the copy's list of versions, which are all whole, and checks everything that it reads.
    """

    def __init__(self, url: str, security: ClientSecurity, holder: Holder, limits: ManifestLimits) -> None:
        self.target = url.rstrip("/")
        self._holder, self._limits, self._open_source = holder, limits, opener(security)
        self._blobs = StaticSource(self.target)
        self._session: aiohttp.ClientSession | None = None
        self._known: dict[int, StaticVersion] = {}

    async def close(self) -> None:
        await self._blobs.close()
        if self._session is not None:
            await self._session.close()

    def pool(self) -> SourcePool:
        return SourcePool(OpenSource(self._blobs, "upstream", self.target, UNLISTED), self._open_source, self._holder)

    async def watch(self) -> AsyncIterator[VersionInfo]:
        seen: set[VersionInfo] = set()
        while True:
            listed = await self._get(VERSIONS, tuple[VersionInfo, ...])
            for info in sorted(set(listed) - seen, key=lambda info: info.version.version):
                yield info
            seen |= set(listed)
            await asyncio.sleep(POLL_S)

    async def find(self, request: PathRequest) -> FoundVersion:
        """Ways to a version (0: the newest). Raises `VersionUnavailable` if it is not there."""
        if request.done:
            return FoundVersion()  # a static copy keeps no account of its readers
        stream = request.stream
        number = request.version or await self._newest(stream)
        keyframes: dict[int, int] = {}
        steps: list[PatchStep] = []
        seen: set[int] = set(request.have)
        open_ends = {number}
        for _ in range(_STEPS):
            for end in sorted(open_ends):
                try:
                    found = await self._version(stream, end)
                except VersionUnavailable:
                    if end == number:
                        raise
                    continue  # a copy may begin with a version that has a parent
                if found.dense:
                    keyframes[end] = dense_bytes(found.manifest)
                steps += [PatchStep(patch.base.version, end, patch.size) for patch in found.patches]
            seen |= open_ends
            open_ends = {step.base for step in steps} - seen - set(keyframes)
            if not open_ends:
                break
        ways = find_paths(keyframes, steps, number, request.have, scratch=request.scratch)
        return FoundVersion(tuple(ways), (), POLL_S)

    async def manifest(self, stream: Stream, version: int) -> Manifest:
        return (await self._version(stream, version or await self._newest(stream))).manifest

    async def way(self, found: FetchPath, target: Manifest) -> PathLists:
        """The lists of a way. `target` stands for its first manifest if that is no keyframe's, which may not be there.

        Raises `VersionUnavailable` if the copy lacks one of them.
        """
        stream = target.run_id, target.version.policy
        manifests = [await self.manifest(stream, found.start) if found.keyframe else target]
        patches: list[Patch] = []
        for base, number in pairwise((found.start, *found.via)):
            version = await self._version(stream, number)
            there = {patch.base.version: patch for patch in version.patches}
            if base not in there:
                raise VersionUnavailable(f"{self.target} has no patch from version {base} to {number}")
            manifests.append(version.manifest)
            patches.append(there[base])
        return tuple(manifests), tuple(patches)

    async def _newest(self, stream: Stream) -> int:
        listed = await self._get(VERSIONS, tuple[VersionInfo, ...])
        numbers = [info.version.version for info in listed if (info.run_id, info.version.policy) == stream]
        if not numbers:
            raise VersionUnavailable(f"{self.target} has no version of policy {stream[1]} of run {stream[0]}")
        return max(numbers)

    async def _version(self, stream: Stream, number: int) -> StaticVersion:
        version = self._known.get(number) or await self._load(number)
        if (version.manifest.run_id, version.manifest.version.policy) != stream:
            raise VersionUnavailable(f"{self.target} is of another run or policy than {stream[0]}, {stream[1]}")
        return version

    async def _load(self, number: int) -> StaticVersion:
        found = await self._get(file_of(number), StaticVersion)
        await asyncio.to_thread(check_manifest, found.manifest, self._limits)
        for patch in found.patches:
            await asyncio.to_thread(check_patch, patch, found.manifest)
        if found.manifest.version.version != number:
            raise ChunkCorrupt(f"{self.target} has another version under the name of {number}")
        self._known[number] = found
        while len(self._known) > _STEPS:
            del self._known[min(self._known)]
        return found

    async def _get(self, name: str, kind: type[T]) -> T:
        if self._session is None:
            self._session = aiohttp.ClientSession(timeout=_TIMEOUT)
        try:
            async with self._session.get(f"{self.target}/{name}", allow_redirects=False) as answer:
                if answer.status == 404:
                    raise VersionUnavailable(f"{self.target} has no {name}")
                if answer.status != 200:
                    raise Unavailable(f"{self.target}/{name} answered {answer.status}")
                data = bytearray()
                async for part in answer.content.iter_chunked(1 << 18):
                    data += part
                    if len(data) > _MOST_BYTES:
                        raise ChunkCorrupt(f"{self.target}/{name} has more than {_MOST_BYTES} bytes")
        except (aiohttp.ClientError, TimeoutError) as error:
            raise Unavailable(f"{self.target} cannot be read ({type(error).__name__}: {error})") from None
        try:
            return msgspec.msgpack.decode(bytes(data), type=kind)
        except msgspec.MsgspecError as error:
            raise ChunkCorrupt(f"{self.target}/{name} is not of a static copy ({error})") from None
