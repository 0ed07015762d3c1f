"""Reads versions as a worker does: into a mirror, by patches where there is a way."""

import torch
from safetensors.torch import load_file

from ebbtide.auth.security import ClientSecurity
from ebbtide.client.service_peer import ServicePeer
from ebbtide.transfer import Mirror, Pulled, Puller, opener
from ebbtide.types.weights import Holder, Manifest
from ebbtide.v1.weights_pb2_grpc import WeightsStub

TOKEN = "a-token-of-tests"


class Reader:
    """Follows the versions of one run; `pulled` and `manifest` are of the last one."""

    pulled: Pulled
    manifest: Manifest

    def __init__(self, peer: ServicePeer, run: str, publisher: bytes = b"") -> None:
        holder = Holder(name=f"reader-of-{run}")
        self._puller = Puller(
            WeightsStub(peer.channel),
            peer.target,
            holder=lambda: holder,
            patience_s=5.0,
            open_source=opener(ClientSecurity(token=TOKEN)),
        )
        self._run, self._publisher = run, publisher
        self._mirror: Mirror | None = None

    async def read(self, version: int) -> dict[str, torch.Tensor]:
        manifest = await self._puller.manifest(self._run, "policy", version, publisher=self._publisher)
        mirror = self._mirror = self._mirror or Mirror(manifest, None)
        async with mirror.hold():
            self.pulled = await self._puller.pull(
                self._run, manifest.version, mirror, manifest, publisher=self._publisher
            )
        self.manifest = manifest
        found: dict[str, torch.Tensor] = load_file(mirror.path)
        return {name: tensor.clone() for name, tensor in found.items()}

    def close(self) -> None:
        self._puller.close()
        if self._mirror is not None:
            self._mirror.close()
