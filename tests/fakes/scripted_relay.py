"""Relays for workers: one that can be made to misbehave, and the real one, beyond a way that can be held or cut."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from ebbtide.auth.security import ClientSecurity
from ebbtide.errors import StoreUnavailable, VersionUnavailable
from ebbtide.local_cluster.launcher import Program, ProgramProcess
from ebbtide.rpc.channel import open_channel
from ebbtide.types.weights import PolicyVersion
from ebbtide.v1 import types_pb2, weights_pb2, weights_pb2_grpc
from ebbtide.weights import (
    ManifestPart,
    Signer,
    build_manifest,
    named_tensor,
    slice_tiles,
    split_manifest,
    split_patch,
    tile_digest,
)
from ebbtide.wire import to_proto
from tests.fakes.links import Way
from tests.unit.weights.chain import Link

TOKEN = "a-token-of-tests"
RUN, POLICY = "run-1", "policy"
T = TypeVar("T")


class Relay(weights_pb2_grpc.WeightsServicer):
    """Serves versions of one tensor; counts the tiles that it gave away."""

    def __init__(self) -> None:
        self.manifests: dict[int, Any] = {}
        self.tiles: dict[bytes, bytes] = {}
        self.served = self.asked = 0
        self.flowing = asyncio.Event()
        self.flowing.set()
        self.corrupt = self.broken = 0  # so many more tiles come altered, or not at all
        self.told: list[weights_pb2.FindWayRequest] = []
        self.sources: list[weights_pb2.BlobSource] = []  # named beside itself

    def publish(self, number: int, *, changed_tiles: int = 4, run_id: str = RUN) -> PolicyVersion:
        """A version of four tiles, of which so many are its own."""
        data = np.repeat(np.arange(4, dtype=np.float32), 64)
        data[: 64 * changed_tiles] += number * 10
        tensor = named_tensor("weight", data)
        version = PolicyVersion(policy=POLICY, version=number, parent=number - 1, step=number)
        manifest = build_manifest(run_id, version, [tensor], tile_bytes=256)
        self.tiles |= {tile_digest(tile): bytes(tile) for tile in slice_tiles(tensor, 256)}
        self.manifests[number] = manifest
        sealed: PolicyVersion = manifest.version
        return sealed

    async def GetManifest(self, request: weights_pb2.VersionRef, context: Any) -> Any:
        if request.version not in self.manifests:
            raise VersionUnavailable(f"version {request.version} is not here")
        for part in split_manifest(self.manifests[request.version]):
            yield to_proto(part, weights_pb2.ManifestPart)

    async def FetchTiles(self, request: weights_pb2.FetchTilesRequest, context: Any) -> Any:
        self.asked += 1
        for digest in request.digests:
            await self.flowing.wait()
            if self.broken:
                self.broken -= 1
                raise StoreUnavailable("the relay's disk is away")
            data = self.tiles[digest]
            if self.corrupt:
                self.corrupt -= 1
                data = data[:-1] + bytes([data[-1] ^ 1])
            self.served += 1
            yield weights_pb2.Tile(digest=digest, data=data)

    async def FindWay(self, request: weights_pb2.FindWayRequest, context: Any) -> weights_pb2.FindWayResponse:
        if request.version not in self.manifests:
            raise VersionUnavailable(f"version {request.version} is not here")
        self.told.append(request)
        way = weights_pb2.Way(start=request.version, keyframe=True, size=1024)
        return weights_pb2.FindWayResponse(ways=[way], sources=self.sources, again_s=1.0)

    def GetPatch(self, request: Any, context: Any) -> Any:
        raise NotImplementedError

    def DescribeVersions(self, request: Any, context: Any) -> Any:
        raise NotImplementedError

    def BeginPublish(self, request_iterator: Any, context: Any) -> Any:
        raise NotImplementedError

    def PutTiles(self, request_iterator: Any, context: Any) -> Any:
        raise NotImplementedError

    def CommitPublish(self, request: Any, context: Any) -> Any:
        raise NotImplementedError

    def WatchEnded(self, request: Any, context: Any) -> Any:
        raise NotImplementedError

    def WatchVersions(self, request: Any, context: Any) -> Any:
        raise NotImplementedError


class LiveRelay:
    """The real relay as a process of its own; workers reach it at `way.address`, also when it was started again."""

    way: Way

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._process: ProgramProcess | None = None
        self.signer = Signer(b"s" * 32)

    async def start(self) -> None:
        first = self._process is None
        self._directory.mkdir(exist_ok=True)
        listen = "127.0.0.1:0" if self._process is None else self._process.address
        ready, data = self._directory / "ready.json", self._directory / "data"
        command = [sys.executable, "-m", "ebbtide.weight_relay", "--data-dir", str(data), "--server-listen", listen]
        command += ["--ready-file", str(ready), "--die-with-parent", str(os.getpid())]
        program = Program(
            name="relay",
            command=tuple(command),
            environment={**os.environ, "EBBTIDE_TOKEN": TOKEN},
            log=self._directory / "log",
            ready_file=ready,
        )
        self._process = ProgramProcess(program)
        await self._process.wait_ready()
        if first:
            self.way = await Way.open(self._process.address)

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()

    async def stop(self) -> None:
        self.kill()
        await self.way.close()

    async def publish(self, *links: Link) -> PolicyVersion:
        """Publish these as a trainer would: signed, and by patches where they have some. Returns the last."""
        assert self._process is not None
        async with open_channel(self._process.address, ClientSecurity(token=TOKEN)) as channel:
            stub = weights_pb2_grpc.WeightsStub(channel)
            for link in links:
                manifest = self.signer.sign(link.manifest)
                parts = list(split_manifest(manifest))
                if link.patch is not None:
                    signed = self.signer.sign_patch(link.patch)
                    parts += [ManifestPart(patch=part) for part in split_patch(signed)]
                messages = [to_proto(part, weights_pb2.ManifestPart) for part in parts]
                missing = (await stub.BeginPublish(each(messages))).missing
                tiles = [weights_pb2.Tile(digest=digest, data=link.blobs[digest]) for digest in missing]
                await stub.PutTiles(each(tiles))
                version = to_proto(manifest.version, types_pb2.PolicyVersion)
                run_id = manifest.run_id
                await stub.CommitPublish(weights_pb2.CommitPublishRequest(run_id=run_id, version=version))
        return links[-1].manifest.version

    async def describe(self, run_id: str) -> weights_pb2.DescribeVersionsResponse:
        assert self._process is not None
        async with open_channel(self._process.address, ClientSecurity(token=TOKEN)) as channel:
            stub = weights_pb2_grpc.WeightsStub(channel)
            return await stub.DescribeVersions(weights_pb2.DescribeVersionsRequest(run_id=run_id))


async def each(items: Iterable[T]) -> AsyncIterator[T]:
    for item in items:
        yield item
