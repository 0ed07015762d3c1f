"""A trainer as far as a relay sees it: the SDK, which publishes a line of versions by what changed in each."""

import numpy as np

from ebbtide.auth.security import ClientSecurity
from ebbtide.client.publisher.publisher import Authority
from ebbtide.client.relay_client import RelayClient
from ebbtide.client.service_peer import ServicePeer
from ebbtide.types.weights import PolicyVersion
from ebbtide.weights import Signer
from tests.fakes.scripted_relay import POLICY, RUN, TOKEN

_SEED = b"p" * 32


class Trainer:
    """Changes one element in fifty of all at each step."""

    def __init__(self, address: str, elements: int = 1 << 18) -> None:
        """`elements`: of two tensors in float16 together."""
        self._peer = ServicePeer("weight-relay", address, ClientSecurity(token=TOKEN), patience_s=10.0)
        authority = Authority(self._reserve, self._announce)
        self._publisher = RelayClient(self._peer).publisher(RUN, POLICY, authority=authority)
        self._random = np.random.default_rng(7)
        self.weights = {
            name: self._random.normal(size=elements // 2).astype(np.float16).reshape(256, -1) for name in ("up", "down")
        }
        self.number, self.key = 0, Signer(_SEED).public
        self.dense = sum(one.nbytes for one in self.weights.values())

    async def step(self) -> PolicyVersion:
        """Train a step, and publish."""
        for one in self.weights.values():
            bits = one.reshape(-1).view(np.uint16)
            bits[self._random.integers(0, bits.size, bits.size // 50)] += 1
        self.number += 1
        return await (await self._publisher.publish(self.weights, step=self.number, parent=self.number - 1))

    def forget(self) -> None:
        """Change everything."""
        for one in self.weights.values():
            one[...] = self._random.normal(size=one.shape)

    def exact(self) -> dict[str, bytes]:
        return {name: one.tobytes() for name, one in self.weights.items()}

    async def close(self) -> None:
        await self._peer.close()

    async def _reserve(self) -> tuple[int, bytes]:
        return self.number, _SEED

    async def _announce(self, version: PolicyVersion) -> None:
        """Nobody waits for it."""
