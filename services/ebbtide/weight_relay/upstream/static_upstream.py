"""Follows a static copy as if it were a relay: it polls the copy's list of versions, which are all whole."""

import asyncio
from collections.abc import AsyncIterator
from itertools import pairwise
from typing import Final, TypeVar

import aiohttp
import msgspec

from ebbtide.auth.security import ClientSecurity
from ebbtide.errors import ChunkCorrupt, Unavailable, VersionUnavailable
from ebbtide.scheduling.distribution.retained_bytes import Stream
from ebbtide.scheduling.distribution.version_paths import PatchStep, find_ways
from ebbtide.transfer import opener
from ebbtide.transfer.sources.source_pool import UNLISTED, OpenSource, SourcePool
from ebbtide.transfer.sources.static_source import StaticSource
from ebbtide.transfer.version_finder import FoundVersion, WayLists, WayRequest
from ebbtide.types.weights import FoundWay, Holder, Manifest, Patch, VersionInfo
from ebbtide.weight_relay.export.static_copy import VERSIONS, StaticVersion, file_of
from ebbtide.weight_relay.library.version_records import dense_bytes
from ebbtide.weights import ManifestLimits, check_manifest, check_patch

T = TypeVar("T")

#: Poll interval: a version is minutes old when it has been exported and uploaded.
POLL_S: Final = 10.0
#: Largest file of lists: as many digests as the largest manifest and a patch have.
_MOST_BYTES: Final = 512 << 20
_TIMEOUT: Final = aiohttp.ClientTimeout(total=120.0, sock_connect=10.0, sock_read=30.0)
#: Longest chain of patches that is followed.
_STEPS: Final = 64


class StaticUpstream:
    """The copy at `url`; an `Upstream`. It checks everything that it reads."""

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

    async def find(self, request: WayRequest) -> FoundVersion:
        """Ways to a version (0: the newest). Raises `VersionUnavailable` if it is not there."""
        if request.done:
            return FoundVersion()  # a static copy keeps no account of its readers
        stream = request.stream
        number = request.version or await self._newest(stream)
        anchors: dict[int, int] = {}
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
                    anchors[end] = dense_bytes(found.manifest)
                steps += [PatchStep(patch.base.version, end, patch.size) for patch in found.patches]
            seen |= open_ends
            open_ends = {step.base for step in steps} - seen - set(anchors)
            if not open_ends:
                break
        ways = find_ways(anchors, steps, number, request.have, scratch=request.scratch)
        return FoundVersion(tuple(ways), (), POLL_S)

    async def manifest(self, stream: Stream, version: int) -> Manifest:
        return (await self._version(stream, version or await self._newest(stream))).manifest

    async def way(self, found: FoundWay, target: Manifest) -> WayLists:
        """The lists of a way. `target` stands for its first manifest if that is no anchor's, which may not be there.

        Raises `VersionUnavailable` if the copy lacks one of them.
        """
        stream = target.run_id, target.version.policy
        manifests = [await self.manifest(stream, found.start) if found.anchor else target]
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
