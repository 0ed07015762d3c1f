"""Policy versions pulled from the relay, verified tile by tile, and laid out as a safetensors file in memory.

Invariant: a file holds only bytes that matched the digests of a manifest whose root is the announced one. Files
are memfds: they have no name, engine processes reach them below /proc, and the kernel frees them when this
process dies.
"""

import asyncio
import json
import os
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Final, TypeVar

from ebbtide import telemetry
from ebbtide.errors import ChunkCorrupt, InvalidRequest, Unavailable
from ebbtide.rollout_worker.engine import Shapes
from ebbtide.rollout_worker.engine.checkpoint import architecture, misfits
from ebbtide.rpc.convert import from_proto
from ebbtide.rpc.retry import retrying
from ebbtide.rpc.status import translated
from ebbtide.types.weights import Manifest, PolicyVersion
from ebbtide.v1 import weights_pb2
from ebbtide.v1.weights_pb2_grpc import WeightsStub
from ebbtide.weights import Assembly, ManifestJoiner, ManifestPart

log = telemetry.get_logger(__name__)
T = TypeVar("T")

#: Tiles asked for at once: a broken stream costs at most this many again.
_BATCH: Final = 64
#: No tile for so long: the relay is asked again.
_STREAM_S: Final = 60.0


class OtherArchitecture(InvalidRequest):
    """The version's tensors are not those of the engine's model; `architecture` is what they are."""

    def __init__(self, message: str, *, architecture: str) -> None:
        super().__init__(message, field="weights")
        self.architecture = architecture


class WeightsFile:
    """The tensors of one complete version, in safetensors' format: u64 header length, JSON header, data."""

    def __init__(self, assembly: Assembly) -> None:
        self.manifest = assembly.manifest
        header: dict[str, dict[str, object]] = {}
        end = 0
        for entry in self.manifest.tensors:
            header[entry.name] = {
                "dtype": entry.dtype,
                "shape": entry.shape,
                "data_offsets": (end, end := end + entry.size),
            }
        text = json.dumps(header).encode()
        text = text.ljust(-(-len(text) // 8) * 8)
        self._fd = os.memfd_create("ebbtide-weights")
        self._data_at = 8 + len(text)
        os.write(self._fd, len(text).to_bytes(8, "little") + text)
        with os.fdopen(os.dup(self._fd), "wb") as out:
            for tensor in assembly.tensors().values():
                out.write(tensor.data)

    @property
    def path(self) -> Path:
        return Path(f"/proc/{os.getpid()}/fd/{self._fd}")

    def tiles(self, wanted: Sequence[bytes]) -> Iterator[tuple[bytes, bytes]]:
        """Those of the tiles `wanted` that this version has too: digest and data."""
        missing, at = set(wanted), self._data_at
        for entry in self.manifest.tensors:
            for index, digest in enumerate(entry.digests):
                start = index * self.manifest.tile_bytes
                if digest in missing:
                    missing.remove(digest)
                    yield digest, os.pread(self._fd, min(self.manifest.tile_bytes, entry.size - start), at + start)
            at += entry.size

    def close(self) -> None:
        os.close(self._fd)


class Puller:
    """Gets versions from one relay."""

    def __init__(self, stub: WeightsStub, target: str, *, patience_s: float) -> None:
        """`patience_s`: how long a relay may be away before a pull fails."""
        self._stub = stub
        self._target, self._patience_s = target, patience_s

    async def pull(self, run_id: str, version: PolicyVersion, shapes: Shapes, held: WeightsFile | None) -> WeightsFile:
        """All of `version`, verified; tiles that `held` has too are not fetched.

        Raises `OtherArchitecture` for weights that do not fit `shapes`, `InvalidRequest` for a manifest that is not the
        announced one, `VersionUnavailable` if the relay has none of it, `ChunkCorrupt` or `Unavailable` if that is how
        it still was when patience ended.
        """
        manifest = await self._patiently(lambda: self._manifest(run_id, version))
        check_fit(manifest, shapes)
        assembly = await asyncio.to_thread(Assembly, manifest)
        if held is not None:
            for digest, data in held.tiles(assembly.missing):
                await asyncio.to_thread(assembly.place, digest, data)
        reused = len({digest for entry in manifest.tensors for digest in entry.digests}) - len(assembly.missing)
        log.info("pulling", run_id=run_id, version=version.version, tiles=len(assembly.missing), reused=reused)
        while not assembly.complete:
            await self._patiently(lambda: self._fetch(assembly))
        return await asyncio.to_thread(WeightsFile, assembly)

    async def _patiently(self, call: Callable[[], Awaitable[T]]) -> T:
        return await retrying(call, patience_s=self._patience_s, on=(Unavailable, ChunkCorrupt))

    async def _manifest(self, run_id: str, version: PolicyVersion) -> Manifest:
        joiner = ManifestJoiner()
        ref = weights_pb2.VersionRef(run_id=run_id, policy=version.policy, version=version.version)
        with translated("weight-relay", self._target):
            async for part in self._stub.GetManifest(ref, timeout=_STREAM_S):
                joiner.add(from_proto(part, ManifestPart))
        manifest = joiner.join()
        if manifest.version != version or manifest.run_id != run_id:
            raise InvalidRequest("the relay's manifest is not that of the version announced", field="version.root")
        return manifest

    async def _fetch(self, assembly: Assembly) -> None:
        request = weights_pb2.FetchTilesRequest(digests=assembly.missing[:_BATCH])
        with translated("weight-relay", self._target):
            async for tile in self._stub.FetchTiles(request, timeout=_STREAM_S):
                await asyncio.to_thread(assembly.place, tile.digest, tile.data)


def check_fit(manifest: Manifest, shapes: Shapes) -> None:
    """Raise `OtherArchitecture` unless the version has just the tensors `shapes` of the engine's model (empty: any)."""
    found = {entry.name: entry.shape for entry in manifest.tensors}
    if shapes and (names := misfits(found, shapes)):
        raise OtherArchitecture(
            f"of another architecture than this engine's model: see {names}",
            architecture=architecture(found),
        )
