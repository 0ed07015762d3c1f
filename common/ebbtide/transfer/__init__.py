"""Bringing a policy version to this host: a mirror of it in memory, and the puller that brings the mirror along.

For workers and the SDK alike: numpy and grpc, nothing heavier; aiohttp only where a static copy is read.
"""

from ebbtide.transfer.cache import BlobCache
from ebbtide.transfer.changes import Changes
from ebbtide.transfer.mirror import Mirror
from ebbtide.transfer.puller import Pulled, Puller
from ebbtide.transfer.shared import check_folder
from ebbtide.transfer.sources import GrpcSource, Opener, Source, check_peer, opener

__all__ = [
    "BlobCache",
    "Changes",
    "GrpcSource",
    "Mirror",
    "Opener",
    "Pulled",
    "Puller",
    "Source",
    "check_folder",
    "check_peer",
    "opener",
]
