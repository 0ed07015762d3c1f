"""Brings policy versions to a host: a `Puller` fetches them from any source into a `Mirror` in memory.

Workers and the SDK share it, so it needs only numpy and grpc, and aiohttp where a static copy is read.
"""

from ebbtide.transfer.blob_cache import BlobCache
from ebbtide.transfer.element_changes import ElementChanges
from ebbtide.transfer.mirror import Mirror
from ebbtide.transfer.puller import Pulled, Puller
from ebbtide.transfer.shared_folder import check_folder
from ebbtide.transfer.sources import GrpcSource, Opener, TileSource, check_peer, opener

__all__ = [
    "BlobCache",
    "ElementChanges",
    "GrpcSource",
    "Mirror",
    "Opener",
    "Pulled",
    "Puller",
    "TileSource",
    "check_folder",
    "check_peer",
    "opener",
]
