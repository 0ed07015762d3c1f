"""A relay as its own process, so that it can be killed, and clients of it."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest

from ebbtide.client.retry import Peer
from ebbtide.client.weights import Relay
from ebbtide.rpc.convert import to_proto
from ebbtide.rpc.security import ClientSecurity
from ebbtide.testing import wait_until
from ebbtide.types.weights import Manifest, PolicyVersion
from ebbtide.v1 import types_pb2, weights_pb2
from ebbtide.v1.weights_pb2_grpc import WeightsStub
from ebbtide.weights import build_manifest, named_tensor, slice_tiles, split_manifest, tile_digest

TOKEN = "a-token-of-tests"
T = TypeVar("T")


class RelayProcess:
    """A weight-relay on a directory of its own; started again, it has the same directory and port."""

    def __init__(self, directory: Path) -> None:
        self.data = directory / "data"
        self._ready = directory / "ready.json"
        self._process: subprocess.Popen[bytes] | None = None
        self.address = "127.0.0.1:0"

    async def start(self, *flags: str) -> None:
        self._ready.unlink(missing_ok=True)
        command = [sys.executable, "-m", "ebbtide.weight_relay", "--data-dir", str(self.data)]
        command += ["--server-listen", self.address, "--ready-file", str(self._ready), *flags]
        environment = {**os.environ, "EBBTIDE_TOKEN": TOKEN}
        self._process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)  # noqa: ASYNC220
        await wait_until(self._ready.exists, timeout=30, what="the relay")
        self.address = json.loads(self._ready.read_text())["address"]

    def end(self, how: signal.Signals) -> int:
        assert self._process is not None
        self._process.send_signal(how)
        return self._process.wait(20)

    def close(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self.end(signal.SIGKILL)

    def tiles(self) -> set[str]:
        return {path.name for path in (self.data / "tiles").iterdir()}

    def manifests(self) -> list[Path]:
        return sorted((self.data / "versions").rglob("*.manifest"))


@pytest.fixture
def process(tmp_path: Path) -> Iterator[RelayProcess]:
    relay = RelayProcess(tmp_path)
    yield relay
    relay.close()


@pytest.fixture
async def peer(process: RelayProcess) -> AsyncIterator[Peer]:
    """A connection to the relay, which this starts."""
    await process.start()
    peer = Peer("weight-relay", process.address, ClientSecurity(token=TOKEN), patience_s=10.0)
    yield peer
    await peer.close()


@pytest.fixture
def relay(peer: Peer) -> Relay:
    return Relay(peer)


class Wire:
    """The calls of the contract, one by one, without the SDK's repetitions."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self.stub = WeightsStub(peer.channel)

    async def begin(self, manifest: Manifest) -> list[bytes]:
        parts = [to_proto(part, weights_pb2.ManifestPart) for part in split_manifest(manifest)]
        with self._peer.translated():
            return list((await self.stub.BeginPublish(each(parts))).missing)

    async def put(self, tiles: dict[bytes, bytes]) -> int:
        messages = [weights_pb2.Tile(digest=digest, data=data) for digest, data in tiles.items()]
        with self._peer.translated():
            return (await self.stub.PutTiles(each(messages))).stored

    async def commit(self, manifest: Manifest) -> weights_pb2.VersionInfo:
        version = to_proto(manifest.version, types_pb2.PolicyVersion)
        with self._peer.translated():
            return await self.stub.CommitPublish(weights_pb2.CommitPublishRequest(run_id="run", version=version))

    async def fetch(self, digests: Iterable[bytes], most: int = 1000) -> dict[bytes, bytes]:
        """The first `most` tiles of a fetch, which then is broken off."""
        found: dict[bytes, bytes] = {}
        call = self.stub.FetchTiles(weights_pb2.FetchTilesRequest(digests=digests))
        with self._peer.translated():
            async for tile in call:
                found[tile.digest] = tile.data
                if len(found) == most:
                    call.cancel()
                    break
        return found


async def each(items: Iterable[T]) -> AsyncIterator[T]:
    for item in items:
        yield item


@pytest.fixture
def wire(peer: Peer) -> Wire:
    return Wire(peer)


class Sample:
    """A version of 12 tiles, and what a publisher sends for it."""

    def __init__(self, version: int = 1, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.weights = {f"layer.{i}": rng.integers(0, 256, 3 << 20, dtype="u1") for i in range(4)}
        self.version = PolicyVersion(policy="policy", version=version)
        tensors = [named_tensor(*item) for item in self.weights.items()]
        self.manifest: Manifest = build_manifest("run", self.version, tensors)
        self.tiles = {tile_digest(tile): bytes(tile) for tensor in tensors for tile in slice_tiles(tensor)}


@pytest.fixture
def sample() -> Sample:
    return Sample()
