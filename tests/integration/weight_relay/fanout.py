"""Relays of this process, what they are given, and readers that pull from them: for tests of the fan-out."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np

from ebbtide.auth.security import ClientSecurity, ServerSettings
from ebbtide.rollout_worker.installs.peers import PeerBlobs, add_to_server
from ebbtide.rollout_worker.installs.peers import PeerServicer as WorkersServicer
from ebbtide.rollout_worker.settings import WorkerSettings
from ebbtide.rpc.channel import Channel, open_channel
from ebbtide.rpc.server import Server
from ebbtide.transfer import BlobCache, Mirror, Puller, opener
from ebbtide.types.weights import Holder, Manifest, Patch, PolicyVersion, WeightsState
from ebbtide.v1 import weights_pb2 as pb
from ebbtide.v1.weights_pb2_grpc import WeightsStub, add_WeightsServicer_to_server
from ebbtide.weight_relay.service import WeightRelay
from ebbtide.weight_relay.servicer import SERVICE
from ebbtide.weight_relay.settings import RelaySettings
from ebbtide.weights import NamedTensor, Signer, named_tensor, seal_manifest, seal_patch
from ebbtide.weights.version_encoding import Described, encode_version
from ebbtide.wire import from_proto

TOKEN = "a-token-of-tests"
SECURITY = ClientSecurity(token=TOKEN)
STREAM = ("run", "policy")
#: Small, so that a version has many tiles and a slow link few bytes.
TILE = 1 << 16
KIB = 1 << 10
SIGNER = Signer(bytes(range(32)))


class RunningRelay:
    def __init__(self, relay: WeightRelay, address: str, stub: WeightsStub) -> None:
        self.relay, self.fanout, self.address, self.stub = relay, relay.fanout, address, stub

    def versions(self) -> list[int]:
        return sorted(self.relay.library.index.stream(STREAM))

    def arriving(self) -> dict[int, int]:
        """The versions on their way here, and the blobs that each still lacks."""
        index = self.relay.library.index
        return {stage.number: sum(1 for _ in index.missing(stage)) for stage in index.stages if stage.arriving}

    async def describe(self) -> WeightsState:
        return from_proto(await self.stub.DescribeVersions(pb.DescribeVersionsRequest(run_id="run")), WeightsState)

    async def find(self, name: str, version: int = 0, *, site: str = "", address: str = "", **more: Any) -> list[str]:
        """The addresses that FindWay names."""
        holder = pb.Holder(name=name, site=site, address=address)
        request = pb.FindWayRequest(run_id="run", policy="policy", version=version, holder=holder, **more)
        return [source.address for source in (await self.stub.FindWay(request)).sources]


@asynccontextmanager
async def running(
    folder: Path, listen: str = "127.0.0.1:0", *, token_keys: str = "", **settings: Any
) -> AsyncIterator[RunningRelay]:
    """A relay of this process over `folder`, with a server of its own."""
    server_settings = ServerSettings(token=TOKEN, listen=listen, token_keys=token_keys)
    relay = WeightRelay(
        RelaySettings(data_dir=str(folder), server=server_settings, upstream_security=SECURITY, **settings)
    )
    server = Server(server_settings, [(add_WeightsServicer_to_server, relay.servicer, SERVICE)])
    await relay.open()
    await server.start()
    serving = asyncio.create_task(relay.run())
    channel = open_channel(server.address, SECURITY)
    try:
        yield RunningRelay(relay, server.address, WeightsStub(channel))
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        await channel.close()
        await server.stop(0.0)
        await relay.close()


class Version:
    """A version of `tiles` tiles that a publisher made, with the patch from the one before if there is one."""

    def __init__(self, number: int, tiles: int = 24, base: "Version | None" = None) -> None:
        if base is None:
            rng = np.random.default_rng(number)
            self.values = {f"w{i}": rng.integers(0, 1 << 16, TILE // 2, dtype="u2") for i in range(tiles)}
        else:
            rng = np.random.default_rng(number)
            self.values = {name: _changed(value, rng) for name, value in base.values.items()}
        self.tensors: list[NamedTensor] = [named_tensor(name, value) for name, value in self.values.items()]
        described = Described(tuple(base.tensors), base.manifest.tensors) if base else None
        encoding = encode_version(self.tensors, described, tile_bytes=TILE)
        made = encoding.result()
        parent = base.manifest.version.version if base else 0
        version = PolicyVersion(policy="policy", version=number, parent=parent)
        self.manifest: Manifest = SIGNER.sign(seal_manifest("run", version, made.entries, TILE))
        self.patch: Patch | None = None
        if base is not None:
            patch = Patch(
                run_id="run",
                base=base.manifest.version,
                version=self.manifest.version,
                tensors=made.patches,
                changed=made.changed,
                elements=made.elements,
            )
            self.patch = SIGNER.sign_patch(seal_patch(patch))
        self.blob = encoding.blob

    @property
    def size(self) -> int:
        return sum(entry.size for entry in self.manifest.tensors)

    async def publish(self, relay: WeightRelay) -> None:
        """As a publisher does, without the wire."""
        for digest in await self.begin(relay):
            await relay.intake.put(digest, bytes(self.blob(digest)))
        await relay.intake.commit("run", self.manifest.version)

    async def begin(self, relay: WeightRelay) -> list[bytes]:
        return await relay.intake.begin(self.manifest, self.patch)


def _changed(values: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """3 % of the elements, by a little."""
    after = values.copy()
    places = rng.choice(len(after), len(after) * 3 // 100, replace=False)
    after[places] += rng.integers(1, 9, len(places), dtype="u2")
    return after


class Reader:
    """A worker's half: a puller, the mirror that it fills, and what it serves to peers, if it does."""

    def __init__(self, name: str, relay: str, site: str = "") -> None:
        self._channel: Channel = open_channel(relay, SECURITY)
        self._cache = BlobCache(64 << 20)
        self._mirror: Mirror | None = None
        self._library = PeerBlobs(self._cache, lambda: self._mirror, WorkerSettings().peer_readers)
        self._server: Server | None = None
        self._address = ""  # for peers; empty until it serves
        self._puller = Puller(
            WeightsStub(self._channel),
            relay,
            holder=lambda: Holder(name=name, site=site, address=self._address),
            patience_s=20.0,
            open_source=opener(SECURITY),
            cache=self._cache,
        )

    async def serve(self) -> None:
        """Serve what comes to peers."""
        self._server = Server(ServerSettings(token=TOKEN), [(add_to_server, WorkersServicer(self._library), SERVICE)])
        await self._server.start()
        self._address = self._server.address

    async def pull(self, version: int) -> dict[str, int]:
        """Bring the mirror to a version; the bytes by source."""
        manifest = await self._puller.manifest("run", "policy", version, publisher=SIGNER.public)
        if self._mirror is None:
            self._mirror = Mirror(manifest, None)
        async with self._mirror.hold():
            pulled = await self._puller.pull("run", manifest.version, self._mirror, manifest, publisher=SIGNER.public)
        return pulled.bytes_by_source

    def holds(self, version: Version) -> bool:
        return self._mirror is not None and self._mirror.holds(version.manifest)

    async def close(self) -> None:
        if self._server is not None:
            await self._server.stop(0.0)
        self._puller.close()
        if self._mirror is not None:
            self._mirror.close()
        await self._channel.close()


@asynccontextmanager
async def readers(count: int, relay: str, site: str = "", *, serve: bool = False) -> AsyncIterator[list[Reader]]:
    found = [Reader(f"w{number}", relay, site) for number in range(count)]
    try:
        for reader in found if serve else ():
            await reader.serve()
        yield found
    finally:
        for reader in found:
            await reader.close()
