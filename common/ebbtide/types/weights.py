"""Defines policy versions, their manifests and patches, and what relays report of them."""

from typing import Annotated, Final, TypeAlias

from msgspec import Meta, Struct

#: Largest tile: well below gRPC's 4 MiB message limit, and large enough that digests cost little.
TILE_BYTES: Final = 1 << 20
DIGEST_BYTES: Final = 32
#: Bytes of a model's config.json: the largest known ones have some ten KiB.
CONFIG_BYTES: Final = 256 << 10
#: Bytes of an Ed25519 public key and signature (RFC 8032).
KEY_BYTES: Final = 32
SIGNATURE_BYTES: Final = 64

#: Longest names of holders and sites.
NAME_CHARS: Final = 256
SITE_CHARS: Final = 128
#: Distance between two processes that exchange blobs: they share memory, a site, or neither.
SAME_HOST, SAME_SITE, FAR = range(3)

#: A slice of a tensor: first index and end in each dimension.
Box: TypeAlias = tuple[tuple[int, int], ...]


class PolicyVersion(Struct, frozen=True, kw_only=True):
    """One immutable weight set: `version` is never reused, `step` counts optimiser steps in its lineage."""

    policy: Annotated[str, Meta(max_length=128)]
    version: int
    parent: int = 0
    step: int = 0
    root: Annotated[bytes, Meta(max_length=DIGEST_BYTES)] = b""


class TensorEntry(Struct, frozen=True, kw_only=True):
    """One tensor, or one piece of a sharded tensor, as its publisher holds it.

    The pieces of a tensor stand one after another, do not overlap, and cover the whole tensor.
    """

    name: str
    dtype: str  # as safetensors names it
    shape: tuple[int, ...]
    size: int  # bytes
    digests: tuple[bytes, ...]  # of its tiles, in order
    start: tuple[int, ...] = ()  # where a piece lies in its tensor; empty for a whole tensor
    full: tuple[int, ...] = ()  # shape of the whole tensor, for a piece; empty for a whole tensor

    @property
    def whole(self) -> bool:
        return not self.full

    @property
    def full_shape(self) -> tuple[int, ...]:
        """The shape of the whole tensor."""
        return self.full or self.shape

    @property
    def box(self) -> Box:
        """The slice of the tensor that this entry covers."""
        start = self.start or (0,) * len(self.shape)
        return tuple((first, first + length) for first, length in zip(start, self.shape, strict=True))


class Manifest(Struct, frozen=True, kw_only=True):
    """All tensors of one version, in the publisher's order.

    The root covers neither `publisher` nor the signatures. Unsigned manifests leave these fields empty.
    """

    run_id: str
    version: PolicyVersion
    tile_bytes: int
    tensors: tuple[TensorEntry, ...]
    publisher: Annotated[bytes, Meta(max_length=KEY_BYTES)] = b""  # public key of the run's publisher
    signature: Annotated[bytes, Meta(max_length=SIGNATURE_BYTES)] = b""  # of `version.root`
    config: Annotated[bytes, Meta(max_length=CONFIG_BYTES)] = b""  # config.json, to start an engine with; may be empty
    config_signature: Annotated[bytes, Meta(max_length=SIGNATURE_BYTES)] = b""  # of root and config together


class TensorPatch(Struct, frozen=True, kw_only=True):
    """The changes of one `TensorEntry`, tile by tile.

    Size 0: the tile equals the base's. The tile's full size: the dense tile of the new version, under its own digest.
    In between: a tile patch (`ebbtide.weights.patch`).
    """

    sizes: tuple[int, ...]  # bytes per tile
    digests: tuple[bytes, ...]  # of the tiles with a size above 0, in order


class Patch(Struct, frozen=True, kw_only=True):
    """The exact change from version `base` to `version` of one policy, both with their roots.

    Both manifests have the same tensors and differ in digests alone. Readers check the patched tensors against the
    manifest, whether or not the patch is signed.
    """

    run_id: str
    base: PolicyVersion
    version: PolicyVersion
    tensors: tuple[TensorPatch, ...]  # one per tensor of the manifests
    changed: int = 0  # elements
    elements: int = 0  # in all
    root: Annotated[bytes, Meta(max_length=DIGEST_BYTES)] = b""  # binds all of the above
    signature: Annotated[bytes, Meta(max_length=SIGNATURE_BYTES)] = b""  # empty for a patch that a relay composed

    @property
    def size(self) -> int:
        """Bytes of all tiles that change."""
        return sum(sum(tensor.sizes) for tensor in self.tensors)


class VersionInfo(Struct, frozen=True, kw_only=True):
    run_id: str
    version: PolicyVersion
    size: int = 0
    tensors: int = 0


class Holder(Struct, frozen=True, kw_only=True):
    """A process that fetches versions, and may serve what it has verified."""

    name: Annotated[str, Meta(max_length=NAME_CHARS)]  # unique
    site: Annotated[str, Meta(max_length=SITE_CHARS)] = ""
    host: Annotated[str, Meta(max_length=256)] = ""  # processes of one host share memory
    address: Annotated[str, Meta(max_length=512)] = ""  # where it serves blobs; empty: nowhere
    lasting: bool = False  # not on a spot machine, so it counts as a copy
    readers: int = 0  # streams that it serves now


class BlobSource(Struct, frozen=True, kw_only=True):
    """A place to fetch blobs from. Holders cannot declare themselves static: only a relay's settings send readers to a
    web server."""

    name: str
    address: str  # of a Weights service, or the URL of a static copy
    site: str = ""
    host: str = ""
    static: bool = False  # a static copy, as the relay's settings name it


def distance(one: Holder | BlobSource, other: Holder | BlobSource) -> int:
    """`SAME_HOST`, `SAME_SITE` or `FAR`. Readers prefer the nearest source."""
    if one.host and one.host == other.host:
        return SAME_HOST
    return SAME_SITE if one.site == other.site else FAR


class FetchPath(Struct, frozen=True, kw_only=True):
    """A way to a version, as a chain of versions."""

    start: int
    keyframe: bool  # the dense tiles of `start` can be fetched
    via: tuple[int, ...] = ()  # versions to patch through, the wanted one last; empty: `start` is the wanted one
    size: int = 0  # bytes to fetch


class PatchState(Struct, frozen=True, kw_only=True):
    """A patch at a relay."""

    base: int
    size: int = 0  # bytes
    density: float = 0.0  # share of the elements that it changes
    composed: bool = False


class VersionState(Struct, frozen=True, kw_only=True):
    """A version at a relay, and the patches that lead to it."""

    info: VersionInfo
    keyframe: bool = False  # its dense tiles are at the relay
    patches: tuple[PatchState, ...] = ()
    age_s: float = 0.0


class HolderState(Struct, frozen=True, kw_only=True):
    """A version that a holder fetches or has."""

    holder: Holder
    policy: str
    version: int
    done: bool = False  # the holder has all of it
    install_s: float = 0.0  # how long generation stood still for it; 0: unknown
    seen_s: float = 0.0  # seconds since the holder's last report


class LinkState(Struct, frozen=True, kw_only=True):
    """A relay's traffic to the readers of one site."""

    site: str = ""
    bytes: int = 0  # since the relay's start
    bytes_per_s: float = 0.0  # lately
    limit: float = 0.0  # bytes per second; 0: none


class WeightsState(Struct, frozen=True, kw_only=True):
    """A relay's knowledge of a run's versions."""

    versions: tuple[VersionState, ...] = ()  # oldest first
    holders: tuple[HolderState, ...] = ()  # those with the latest reports
    links: tuple[LinkState, ...] = ()
    more_holders: int = 0  # left out of `holders`
