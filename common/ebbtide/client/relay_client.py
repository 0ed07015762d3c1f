"""Makes the SDK's calls to a weight-relay: publishing, fetching and watching policy versions.

numpy is imported with this module, which the client imports when weights are first used.
"""

import os
import secrets
import socket
from collections.abc import AsyncGenerator, Callable, Mapping

import numpy as np
from msgspec.structs import replace

from ebbtide.client.publisher.publisher import Authority, Publisher
from ebbtide.client.publisher.rank_exchange import RankExchange
from ebbtide.client.service_peer import ServicePeer
from ebbtide.transfer import Mirror, Puller, opener
from ebbtide.types.weights import Box, Holder, Manifest, VersionInfo, WeightsState
from ebbtide.v1 import weights_pb2 as pb
from ebbtide.v1.weights_pb2_grpc import WeightsStub
from ebbtide.weights import NamedTensor, as_array, places_of
from ebbtide.wire import from_proto


class RelayClient:
    """Calls one relay, for publishers and readers."""

    def __init__(self, peer: ServicePeer) -> None:
        self.peer, self._stub = peer, WeightsStub(peer.channel)
        host = socket.gethostname()
        self._holder = Holder(name=f"sdk-{host}-{os.getpid()}-{secrets.token_hex(4)}", host=host)

    def publisher(
        self,
        run_id: str,
        policy: str,
        *,
        authority: Authority | None,
        exchange: RankExchange | None = None,
        config: bytes = b"",
        forget: Callable[[Publisher], None] | None = None,
    ) -> Publisher:
        """As `Publisher`, for this relay."""
        return Publisher(
            self.peer, run_id, policy, authority=authority, exchange=exchange, config=config, forget=forget
        )

    async def describe(self, run_id: str) -> WeightsState:
        """Return what the relay knows of a run's versions."""
        request = pb.DescribeVersionsRequest(run_id=run_id)
        return from_proto(await self.peer.call(self._stub.DescribeVersions, request), WeightsState)

    async def versions(self, run_id: str, policy: str) -> AsyncGenerator[VersionInfo, None]:
        """Yield the versions that the relay holds, then each new one, once each."""
        seen: set[int] = set()
        request = pb.WatchVersionsRequest(run_id=run_id, policy=policy)
        async for message in self.peer.follow(lambda: self._stub.WatchVersions(request)):
            if message.version.version not in seen:
                seen.add(message.version.version)
                yield from_proto(message, VersionInfo)

    async def fetch(
        self, run_id: str, policy: str, version: int, boxes: Mapping[str, Box] | None = None, publisher: bytes = b""
    ) -> tuple[Manifest, dict[str, NamedTensor]]:
        """Fetch a committed version (0: the newest), verified, from the relay and the sources that it names. With
        `boxes`, fetches only a slice of each tensor there.

        `publisher`: the public key that must have signed it. Raises `VersionUnavailable`, `ChunkCorrupt`,
        `Unavailable`, `PermissionDenied` for a version that another key has signed, and `InvalidRequest` naming a
        tensor that has no such slice.
        """
        puller = Puller(
            self._stub,
            self.peer.target,
            holder=lambda: self._holder,
            patience_s=self.peer.patience_s,
            open_source=opener(self.peer.security),
        )
        try:
            manifest = await puller.manifest(run_id, policy, version, publisher=publisher)
            wanted = None if boxes is None else places_of(manifest, {name: (box,) for name, box in boxes.items()})
            mirror = Mirror(manifest, None)
            try:
                await puller.pull(run_id, manifest.version, mirror, manifest, publisher=publisher, wanted=wanted)
                return manifest, _tensors(mirror, boxes)
            finally:
                mirror.close()
        finally:
            puller.close()


def _tensors(mirror: Mirror, boxes: Mapping[str, Box] | None) -> dict[str, NamedTensor]:
    """Return whole tensors in the publisher's order, as views of the mirror; or copies of the slices."""
    found = {tensor.name: tensor for tensor in mirror.tensors()}
    if boxes is None:
        return {entry.name: found[entry.name] for entry in mirror.manifest.tensors}
    return {name: _slice(found[name], box) for name, box in boxes.items()}


def _slice(tensor: NamedTensor, box: Box) -> NamedTensor:
    part = as_array(tensor)[tuple(slice(first, end) for first, end in box)]
    data = np.ascontiguousarray(part).reshape(-1).view(np.uint8).data
    return replace(tensor, shape=part.shape, data=data, start=tuple(first for first, _ in box), full=tensor.shape)
