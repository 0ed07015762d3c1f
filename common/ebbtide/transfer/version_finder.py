"""What a relay says of versions, each word checked before it is believed.

Invariant: a manifest given out matches its root, and its publisher's signature where the key is known; a patch given
out was checked against the manifest of the version that it leads to, and begins at the one it was asked from. The last
few manifests that passed are kept, since the one just installed is where the next way begins.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from itertools import pairwise
from typing import Final, TypeVar

from msgspec import Struct

from ebbtide.errors import ChunkCorrupt, InvalidRequest
from ebbtide.rpc.status_table import translated
from ebbtide.types.weights import BlobSource, FoundWay, Holder, Manifest, Patch, PolicyVersion
from ebbtide.v1 import weights_pb2 as pb
from ebbtide.v1.weights_pb2_grpc import WeightsStub
from ebbtide.weights import (
    ManifestJoiner,
    ManifestLimits,
    ManifestPart,
    PatchJoiner,
    PatchPart,
    Way,
    check_manifest,
    check_patch,
    check_signature,
    same_geometry,
)
from ebbtide.wire.record_conversion import from_proto, to_proto

A = TypeVar("A")
T = TypeVar("T")
_MANIFESTS: Final = 4
#: Longest chain of patches that is followed: each step costs a manifest; relays compose longer ones.
_STEPS: Final = 64
#: Of an answer, what comes first: the best.
_WAYS: Final = 64
_SOURCES: Final = 16
#: Lists fetched at once, so that a chain over a long line does not take as many times its delay.
_LISTS: Final = 8
#: For the whole of a manifest or of a patch's lists.
_LISTS_S: Final = 120.0


class FoundVersion(Struct, frozen=True):
    ways: tuple[FoundWay, ...] = ()
    sources: tuple[BlobSource, ...] = ()
    again_s: float = 0.0


class VersionQuestion(Struct, frozen=True, kw_only=True):
    """What FindWay is asked, but for who asks: see weights.proto."""

    run_id: str
    policy: str
    version: int
    have: tuple[int, ...] = ()
    bytes_per_s: float = 0.0
    failed: tuple[str, ...] = ()
    done: bool = False
    install_s: float = 0.0
    scratch: bool = False


class VersionFinder:
    def __init__(self, relay: WeightsStub, target: str, holder: Callable[[], Holder]) -> None:
        self._relay, self._target, self._holder = relay, target, holder
        self._manifests: OrderedDict[tuple[str, str, int], Manifest] = OrderedDict()

    async def find(self, question: VersionQuestion, holder: Holder | None = None) -> FoundVersion:
        """Ways and sources, for `holder` or who asks else. Raises `VersionUnavailable` if the relay has not got the
        version."""
        request = to_proto(question, pb.FindWayRequest)
        request.holder.CopyFrom(to_proto(holder or self._holder(), pb.Holder))
        with translated("weight-relay", self._target):
            answer = await self._relay.FindWay(request)
        found = from_proto(answer, FoundVersion)
        return FoundVersion(found.ways[:_WAYS], found.sources[:_SOURCES], found.again_s)

    async def manifest(
        self,
        run_id: str,
        policy: str,
        version: int,
        *,
        publisher: bytes = b"",
        root: bytes = b"",
        limits: ManifestLimits = ManifestLimits(),  # noqa: B008
    ) -> Manifest:
        """A version's manifest (0: the newest's). `publisher`: the key that has to have signed it, `root`: its root
        digest, each if that is known.

        Raises `InvalidRequest` or `ChunkCorrupt` for one that is malformed or another version's, `PermissionDenied`
        for one that `publisher` did not sign, `VersionUnavailable`.
        """
        manifest = self._manifests.get((run_id, policy, version))
        if manifest is None or (root and manifest.version.root != root):
            manifest = await self._manifest(run_id, policy, version, limits)
        if root and manifest.version.root != root:
            raise InvalidRequest("the relay's manifest is not that of the version announced", field="version.root")
        if publisher:
            self._manifests.pop((run_id, policy, manifest.version.version), None)  # kept once it passes
            check_signature(manifest, publisher)
        self._keep((run_id, policy, manifest.version.version), manifest)
        return manifest

    async def _manifest(self, run_id: str, policy: str, version: int, limits: ManifestLimits) -> Manifest:
        joiner = ManifestJoiner(limits)
        ref = pb.VersionRef(run_id=run_id, policy=policy, version=version)
        with translated("weight-relay", self._target):
            async for part in self._relay.GetManifest(ref, timeout=_LISTS_S):
                joiner.add(from_proto(part, ManifestPart))
        manifest = joiner.join()
        await asyncio.to_thread(check_manifest, manifest, limits)
        found = manifest.version
        if (manifest.run_id, found.policy) != (run_id, policy) or version not in {0, found.version}:
            raise ChunkCorrupt("the relay answered with another version's manifest; fetch it again")
        return manifest

    def _keep(self, key: tuple[str, str, int], manifest: Manifest) -> None:
        self._manifests[key] = manifest
        self._manifests.move_to_end(key)
        while len(self._manifests) > _MANIFESTS:
            self._manifests.popitem(last=False)

    async def way(self, found: FoundWay, target: Manifest, *, publisher: bytes = b"") -> Way:
        """The lists of a way to `target`. Raises `InvalidRequest` for one that cannot be gone, and as `manifest`."""
        version = target.version
        if (found.via or (found.start,))[-1] != version.version or len(found.via) > _STEPS:
            raise InvalidRequest(f"does not lead to version {version.version} in {_STEPS} steps", field="ways")
        numbers = (found.start, *found.via)
        manifests = await _together(lambda number: self._step(number, target, publisher), numbers)
        patches = await _together(lambda pair: self._patch(pair[0].version, pair[1]), tuple(pairwise(manifests)))
        return Way(manifests[0], tuple(patches), found.anchor)

    async def _step(self, number: int, target: Manifest, publisher: bytes) -> Manifest:
        if number == target.version.version:
            return target
        manifest = await self.manifest(target.run_id, target.version.policy, number, publisher=publisher)
        if not same_geometry(manifest, target):
            raise InvalidRequest(f"passes version {number}, whose tensors are others", field="ways")
        return manifest

    async def _patch(self, base: PolicyVersion, target: Manifest) -> Patch:
        joiner = PatchJoiner(target)
        ref = pb.PatchRef(run_id=target.run_id, policy=base.policy, base=base.version, version=target.version.version)
        with translated("weight-relay", self._target):
            async for part in self._relay.GetPatch(ref, timeout=_LISTS_S):
                joiner.add(from_proto(part, PatchPart))
        patch = joiner.join()
        await asyncio.to_thread(check_patch, patch, target)
        if patch.base != base:
            self._manifests.pop((target.run_id, base.policy, base.version), None)
            raise ChunkCorrupt("the relay answered with a patch from another version; fetch it again")
        return patch


async def _together(call: Callable[[A], Awaitable[T]], arguments: Sequence[A]) -> list[T]:
    """The results of calls, a few at once; when one fails, so does all of it."""
    turns = asyncio.Semaphore(_LISTS)

    async def one(argument: A) -> T:
        async with turns:
            return await call(argument)

    tasks = [asyncio.create_task(one(argument)) for argument in arguments]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def is_usable(way: FoundWay, have: Iterable[int]) -> bool:
    """Whether a way begins where the asker is, or where anybody can begin."""
    return way.anchor or way.start in have
