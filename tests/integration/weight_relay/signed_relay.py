"""Publishes single versions at a relay under the tests' key, with no coordinator."""

from typing import Any

from ebbtide.client.publisher.publisher import Authority
from ebbtide.client.relay_client import RelayClient
from ebbtide.types.weights import PolicyVersion
from tests.integration.weight_relay.lines import SEED


class SignedRelay(RelayClient):
    """Signs with the tests' key, so that the tests can make calls under it."""

    async def publish(self, run_id: str, version: PolicyVersion, tensors: Any) -> PolicyVersion:
        """Make `tensors` a committed version under a given number."""

        async def reserve() -> tuple[int, bytes]:
            return version.version, SEED

        async def announce(_version: PolicyVersion) -> None:
            """No test waits for it."""

        publisher = self.publisher(run_id, version.policy, authority=Authority(reserve, announce))
        return await (await publisher.publish(tensors, step=version.step, parent=version.parent))
