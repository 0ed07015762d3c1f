"""The SDK's side of a weight-relay: publishing and fetching policy versions.

numpy is imported with this module, which the client imports when weights are first touched.
"""

from ebbtide.client.fetching import Fetcher
from ebbtide.client.publishing import Publisher, Tensors
from ebbtide.client.retry import Peer

__all__ = ["Relay", "Tensors"]


class Relay:
    """A relay for publishers and readers alike."""

    def __init__(self, peer: Peer) -> None:
        publisher, fetcher = Publisher(peer), Fetcher(peer)
        self.publish = publisher.publish
        self.fetch, self.versions = fetcher.fetch, fetcher.versions
