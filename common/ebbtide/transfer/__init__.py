"""Bringing a policy version to this host: a mirror of it in memory, and the puller that brings the mirror along.

For workers and the SDK alike: numpy and grpc, nothing heavier; aiohttp only where a static copy is read.
"""

from ebbtide.transfer.mirror.element_changes import ElementChanges
from ebbtide.transfer.mirror.mirror import Mirror
from ebbtide.transfer.mirror.shared_folder import check_folder
from ebbtide.transfer.puller import Pulled, Puller
from ebbtide.transfer.sources.blob_cache import BlobCache
from ebbtide.transfer.sources.tile_source import GrpcSource, Opener, TileSource, check_peer, opener

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
