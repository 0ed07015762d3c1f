"""Asks a relay for ways, sources, manifests and patches, and checks each answer.

Invariant: a manifest that it returns matches its root, and its publisher's signature where the key is known. A patch
that it returns fits the manifest of its version and begins at the version asked for. It keeps the last few manifests
that passed, since the next way begins at the version just installed.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from itertools import pairwise
from typing import Annotated, Final, TypeAlias, TypeVar

from msgspec import Meta, Struct
from msgspec.structs import replace

from ebbtide.errors import ChunkCorrupt, InvalidRequest
from ebbtide.rpc.status_table import translated
from ebbtide.types.weights import BlobSource, FetchPath, Holder, Manifest, Patch, PolicyVersion
from ebbtide.v1 import weights_pb2 as pb
from ebbtide.v1.weights_pb2_grpc import WeightsStub
from ebbtide.weights import (
    ManifestJoiner,
    ManifestLimits,
    ManifestPart,
    PatchJoiner,
    PatchPart,
    check_manifest,
    check_patch,
    check_signature,
    same_geometry,
)
from ebbtide.wire import from_proto, to_proto

A = TypeVar("A")
T = TypeVar("T")
#: The manifests of the versions that a way passes, first to last, and the patches between them.
PathLists: TypeAlias = tuple[tuple[Manifest, ...], tuple[Patch, ...]]

_MANIFESTS: Final = 4
#: Longest chain of patches that is followed: each step costs a manifest, and relays compose longer ones.
_STEPS: Final = 64
#: Ways and sources of an answer that are used: the first ones are the best.
_WAYS: Final = 64
_SOURCES: Final = 16
#: Lists fetched at once, so that a chain over a distant link does not take one round trip for each step.
_LISTS: Final = 8
#: Deadline for a whole manifest, and for the lists of a patch.
_LISTS_S: Final = 120.0
#: The longest pause of generation, in seconds, that a relay believes.
_MAX_INSTALL_S: Final = 86_400.0

_Versions: TypeAlias = Annotated[tuple[int, ...], Meta(max_length=1024)]
_Addresses: TypeAlias = Annotated[tuple[Annotated[str, Meta(max_length=512)], ...], Meta(max_length=64)]


class PathRequest(Struct, frozen=True, kw_only=True):
    """FindWay's request; see weights.proto. A relay records nothing of a request without a holder."""

    run_id: str
    policy: str
    holder: Holder | None = None  # one with `done` and without an address has the version in its engine alone
    version: int = 0
    have: _Versions = ()
    bytes_per_s: Annotated[float, Meta(ge=0, le=1e15)] = 0.0
    failed: _Addresses = ()
    done: bool = False
    install_s: Annotated[float, Meta(ge=0, le=_MAX_INSTALL_S)] = 0.0
    scratch: bool = False

    @property
    def stream(self) -> tuple[str, str]:
        return self.run_id, self.policy


class FoundVersion(Struct, frozen=True):
    """FindWay's answer."""

    ways: tuple[FetchPath, ...] = ()
    sources: tuple[BlobSource, ...] = ()
    again_s: float = 0.0


class VersionFinder:
    def __init__(self, relay: WeightsStub, target: str, holder: Callable[[], Holder]) -> None:
        self._relay, self._target, self._holder = relay, target, holder
        self._manifests: OrderedDict[tuple[str, str, int], Manifest] = OrderedDict()

    async def find(self, request: PathRequest) -> FoundVersion:
        """Ask for ways and sources, as this finder's holder if the request names none. Raises `VersionUnavailable`."""
        if request.holder is None:
            request = replace(request, holder=self._holder())
        with translated("weight-relay", self._target):
            answer = await self._relay.FindWay(to_proto(request, pb.FindWayRequest))
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
        """A version's manifest (0: the newest's), of `root` and signed by the key `publisher` where these are given.

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

    async def way(self, found: FetchPath, target: Manifest, *, publisher: bytes = b"") -> PathLists:
        """Fetch the lists of a way to `target`. Raises `InvalidRequest` for one that does not lead there, and as
        `manifest`."""
        version = target.version
        if (found.via or (found.start,))[-1] != version.version or len(found.via) > _STEPS:
            raise InvalidRequest(f"does not lead to version {version.version} in {_STEPS} steps", field="ways")
        numbers = (found.start, *found.via)
        manifests = await _together(lambda number: self._step(number, target, publisher), numbers)
        patches = await _together(lambda pair: self._patch(pair[0].version, pair[1]), tuple(pairwise(manifests)))
        return tuple(manifests), tuple(patches)

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
    """Make calls, a few at once. When one fails, all do."""
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


def is_usable(way: FetchPath, have: Iterable[int]) -> bool:
    """Whether a way begins at a version that the requester holds, or at a keyframe."""
    return way.keyframe or way.start in have
