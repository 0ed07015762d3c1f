"""Policy versions and their manifests."""

from typing import Annotated, Final, TypeAlias

from msgspec import Meta, Struct

#: Largest tile: well under gRPC's 4 MiB message limit, and large enough that digests cost little.
TILE_BYTES: Final = 1 << 20
DIGEST_BYTES: Final = 32
#: Of a model's config.json: the largest known have some ten KiB.
CONFIG_BYTES: Final = 256 << 10
#: Ed25519 (RFC 8032): public keys and signatures.
KEY_BYTES: Final = 32
SIGNATURE_BYTES: Final = 64

#: Longest name of a holder, and of a site.
NAME_CHARS: Final = 256
SITE_CHARS: Final = 128
#: How far apart two are that blobs go between: they share memory, or a site, or neither.
SAME_HOST, SAME_SITE, FAR = range(3)

#: A slice of a tensor: first index and end of each dimension.
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

    `dtype` in safetensors' names, `size` in bytes, `digests` of its tiles in order. A piece of `shape` lies at `start`
    in the tensor of shape `full`; both are empty for a whole tensor. The pieces of a tensor stand one after another,
    overlap nowhere and leave nothing out.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    size: int
    digests: tuple[bytes, ...]
    start: tuple[int, ...] = ()
    full: tuple[int, ...] = ()

    @property
    def whole(self) -> bool:
        return not self.full

    @property
    def full_shape(self) -> tuple[int, ...]:
        """The shape of the tensor that this is, or is a piece of."""
        return self.full or self.shape

    @property
    def box(self) -> Box:
        """Where the piece lies in its tensor."""
        start = self.start or (0,) * len(self.shape)
        return tuple((first, first + length) for first, length in zip(start, self.shape, strict=True))


class Manifest(Struct, frozen=True, kw_only=True):
    """All tensors of one version, in the publisher's order.

    `signature` (Ed25519, 64 bytes) of `version.root` by the run's publisher, whose public key is `publisher` (32
    bytes); neither is covered by the root, and both are empty for a manifest that nobody signed. `config`: the model's
    config.json, for who has to start an engine for it, and `config_signature` that of root and config together; both
    are empty where the publisher told none.
    """

    run_id: str
    version: PolicyVersion
    tile_bytes: int
    tensors: tuple[TensorEntry, ...]
    publisher: Annotated[bytes, Meta(max_length=KEY_BYTES)] = b""
    signature: Annotated[bytes, Meta(max_length=SIGNATURE_BYTES)] = b""
    config: Annotated[bytes, Meta(max_length=CONFIG_BYTES)] = b""
    config_signature: Annotated[bytes, Meta(max_length=SIGNATURE_BYTES)] = b""


class TensorPatch(Struct, frozen=True, kw_only=True):
    """What changes in one `TensorEntry`, tile by tile: `sizes` in bytes, and `digests` of the non-empty ones in order.

    A size of 0: the tile is the base's. The size of the tile itself: the dense tile of the new version, by its own
    digest. Less: a tile patch (`ebbtide.weights.patch.tile_format`).
    """

    sizes: tuple[int, ...]
    digests: tuple[bytes, ...]


class Patch(Struct, frozen=True, kw_only=True):
    """The exact change from version `base` to `version` of one policy, both with their roots.

    `tensors` has one entry for each of the manifests' tensors, which agree in all but digests. `root` binds all of it;
    `signature` is the publisher's, and empty for a patch that a relay composed: what a patch makes is checked against
    the manifest in any case. `changed` counts changed elements of `elements` in all.
    """

    run_id: str
    base: PolicyVersion
    version: PolicyVersion
    tensors: tuple[TensorPatch, ...]
    changed: int = 0
    elements: int = 0
    root: Annotated[bytes, Meta(max_length=DIGEST_BYTES)] = b""
    signature: Annotated[bytes, Meta(max_length=SIGNATURE_BYTES)] = b""

    @property
    def size(self) -> int:
        """Bytes of everything but the tiles that stay."""
        return sum(sum(tensor.sizes) for tensor in self.tensors)


class VersionInfo(Struct, frozen=True, kw_only=True):
    run_id: str
    version: PolicyVersion
    size: int = 0
    tensors: int = 0


class Holder(Struct, frozen=True, kw_only=True):
    """Somebody who fetches versions, and may serve on what it has verified.

    `name` is unique. Processes with the same `host` share memory. `address`: where it serves blobs; empty: it serves
    none. `lasting`: not on a spot machine, so that it counts as a copy. `readers`: streams that it is serving now.
    """

    name: Annotated[str, Meta(max_length=NAME_CHARS)]
    site: Annotated[str, Meta(max_length=SITE_CHARS)] = ""
    host: Annotated[str, Meta(max_length=256)] = ""
    address: Annotated[str, Meta(max_length=512)] = ""
    lasting: bool = False
    readers: int = 0


class BlobSource(Struct, frozen=True, kw_only=True):
    """Where blobs may be had: `address` of a Weights service; or, `static`, the URL of a static copy that the relay's
    own settings name. No holder makes itself static: nobody but who runs a relay has readers ask a web server."""

    name: str
    address: str
    site: str = ""
    host: str = ""
    static: bool = False


def distance(one: Holder | BlobSource, other: Holder | BlobSource) -> int:
    """`SAME_HOST`, `SAME_SITE` or `FAR`: blobs are to come from the nearest."""
    if one.host and one.host == other.host:
        return SAME_HOST
    return SAME_SITE if one.site == other.site else FAR


class FoundWay(Struct, frozen=True, kw_only=True):
    """A way by its versions: from `start`, whose dense tiles may be had if it is an `anchor`, through `via`, of which
    the last is the wanted one (empty: `start` is it). `size`: bytes to be fetched."""

    start: int
    anchor: bool
    via: tuple[int, ...] = ()
    size: int = 0


class PatchState(Struct, frozen=True, kw_only=True):
    """A patch at a relay: `size` in bytes, `density` the share of elements that it changes."""

    base: int
    size: int = 0
    density: float = 0.0
    composed: bool = False


class VersionState(Struct, frozen=True, kw_only=True):
    """A version at a relay, and the patches that lead to it. `anchor`: its dense tiles are there."""

    info: VersionInfo
    anchor: bool = False
    patches: tuple[PatchState, ...] = ()
    age_s: float = 0.0


class HolderState(Struct, frozen=True, kw_only=True):
    """A version that somebody fetches, or has whole (`done`).

    `install_s`: seconds for which generation stood still for it; 0: none known. `seen_s`: since it was heard of.
    """

    holder: Holder
    policy: str
    version: int
    done: bool = False
    install_s: float = 0.0
    seen_s: float = 0.0


class LinkState(Struct, frozen=True, kw_only=True):
    """What a relay sent to the readers of a site since its start, and at what rate lately; `limit` 0: none."""

    site: str = ""
    bytes: int = 0
    bytes_per_s: float = 0.0
    limit: float = 0.0


class WeightsState(Struct, frozen=True, kw_only=True):
    """What a relay knows of a run's versions, oldest first. Of many holders those heard of last are told, and how many
    more there are."""

    versions: tuple[VersionState, ...] = ()
    holders: tuple[HolderState, ...] = ()
    links: tuple[LinkState, ...] = ()
    more_holders: int = 0
