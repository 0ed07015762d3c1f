"""The SDK's side of a weight-relay: publishing and fetching policy versions.

numpy is imported with this module, which the client imports when weights are first touched.
"""

from ebbtide.client.fetching import Fetcher
from ebbtide.client.publishing import Publisher, Tensors
from ebbtide.client.retry import Peer
from ebbtide.rpc.convert import from_proto
from ebbtide.types.weights import WeightsState
from ebbtide.v1.weights_pb2 import DescribeVersionsRequest
from ebbtide.v1.weights_pb2_grpc import WeightsStub

__all__ = ["Relay", "Tensors"]


class Relay:
    """A relay for publishers and readers alike."""

    def __init__(self, peer: Peer) -> None:
        self._peer, self._stub = peer, WeightsStub(peer.channel)
        publisher, fetcher = Publisher(peer), Fetcher(peer)
        self.publish = publisher.publish
        self.fetch, self.versions = fetcher.fetch, fetcher.versions

    async def describe(self, run_id: str) -> WeightsState:
        """What the relay knows of a run's versions."""
        request = DescribeVersionsRequest(run_id=run_id)
        return from_proto(await self._peer.call(self._stub.DescribeVersions, request), WeightsState)
