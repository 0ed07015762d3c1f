"""Fetching policy versions: from the relay and from whoever it names, into memory of this process."""

import os
import secrets
import socket
from collections.abc import AsyncGenerator, Mapping

import numpy as np

from ebbtide.client.service_peer import ServicePeer
from ebbtide.transfer import Mirror, Puller, opener
from ebbtide.types.weights import Box, Holder, Manifest, VersionInfo
from ebbtide.v1 import weights_pb2 as pb
from ebbtide.v1.weights_pb2_grpc import WeightsStub
from ebbtide.weights import NamedTensor, as_array, places_of
from ebbtide.wire.record_conversion import from_proto

Tensors = dict[str, NamedTensor]


class VersionFetcher:
    """The weight-relay's calls for who reads."""

    def __init__(self, peer: ServicePeer) -> None:
        self._peer = peer
        self._stub = WeightsStub(peer.channel)
        host = socket.gethostname()
        self._holder = Holder(name=f"sdk-{host}-{os.getpid()}-{secrets.token_hex(4)}", host=host)

    async def fetch(
        self, run_id: str, policy: str, version: int, boxes: Mapping[str, Box] | None = None, publisher: bytes = b""
    ) -> tuple[Manifest, Tensors]:
        """A committed version (0: the newest), verified, or of each tensor in `boxes` a slice and nothing else.

        `publisher`: the public key that has to have signed it. Raises `VersionUnavailable`, `ChunkCorrupt`,
        `Unavailable`, `PermissionDenied` for a version that another key has signed, and `InvalidRequest` naming a
        tensor that has no such slice.
        """
        puller = Puller(
            self._stub,
            self._peer.target,
            holder=lambda: self._holder,
            patience_s=self._peer.patience_s,
            open_source=opener(self._peer.security),
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

    async def versions(self, run_id: str, policy: str) -> AsyncGenerator[VersionInfo, None]:
        """The versions that the relay holds, then each new one, once each."""
        seen: set[int] = set()
        request = pb.WatchVersionsRequest(run_id=run_id, policy=policy)
        async for message in self._peer.follow(lambda: self._stub.WatchVersions(request)):
            if message.version.version not in seen:
                seen.add(message.version.version)
                yield from_proto(message, VersionInfo)


def _tensors(mirror: Mirror, boxes: Mapping[str, Box] | None) -> Tensors:
    """The whole tensors in the publisher's order, as views of the mirror; or copies of the slices."""
    found = {tensor.name: tensor for tensor in mirror.tensors()}
    if boxes is None:
        return {entry.name: found[entry.name] for entry in mirror.manifest.tensors}
    return {name: _slice(found[name], box) for name, box in boxes.items()}


def _slice(tensor: NamedTensor, box: Box) -> NamedTensor:
    part = as_array(tensor)[tuple(slice(first, end) for first, end in box)]
    data = np.ascontiguousarray(part).reshape(-1).view(np.uint8)
    start = tuple(first for first, _ in box)
    return NamedTensor(
        name=tensor.name, dtype=tensor.dtype, shape=part.shape, data=data.data, start=start, full=tensor.shape
    )
