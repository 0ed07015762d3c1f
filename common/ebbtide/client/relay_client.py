"""The SDK's side of a weight-relay: publishing and fetching policy versions.

numpy is imported with this module, which the client imports when weights are first touched.
"""

from collections.abc import Callable

from ebbtide.client.publisher.publisher import Authority, Publisher, Tensors
from ebbtide.client.publisher.rank_exchange import RankExchange
from ebbtide.client.service_peer import ServicePeer
from ebbtide.client.version_fetcher import VersionFetcher
from ebbtide.types.weights import PolicyVersion, WeightsState
from ebbtide.v1.weights_pb2 import DescribeVersionsRequest
from ebbtide.v1.weights_pb2_grpc import WeightsStub
from ebbtide.wire.record_conversion import from_proto

__all__ = ["RelayClient", "Tensors"]


class RelayClient:
    """A relay for publishers and readers alike."""

    def __init__(self, peer: ServicePeer) -> None:
        self._peer, self._stub = peer, WeightsStub(peer.channel)
        fetcher = VersionFetcher(peer)
        self.fetch, self.versions = fetcher.fetch, fetcher.versions

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
            self._peer, run_id, policy, authority=authority, exchange=exchange, config=config, forget=forget
        )

    async def publish(self, run_id: str, version: PolicyVersion, tensors: Tensors) -> PolicyVersion:
        """Make `tensors` a committed version under a number that is given, announced to nobody. Raises as
        `Lease.publish` does, and `AlreadyExists` for a number in use.
        """

        async def reserve() -> tuple[int, bytes]:
            return version.version, b""

        async def announce(_version: PolicyVersion) -> None:
            """Nobody waits for it."""

        publisher = self.publisher(run_id, version.policy, authority=Authority(reserve, announce))
        return await (await publisher.publish(tensors, step=version.step, parent=version.parent))

    async def describe(self, run_id: str) -> WeightsState:
        """What the relay knows of a run's versions."""
        request = DescribeVersionsRequest(run_id=run_id)
        return from_proto(await self._peer.call(self._stub.DescribeVersions, request), WeightsState)
