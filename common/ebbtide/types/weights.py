"""Policy versions and their manifests."""

from typing import Annotated, Final

from msgspec import Meta, Struct

#: Largest tile: well under gRPC's 4 MiB message limit, and large enough that digests cost little.
TILE_BYTES: Final = 1 << 20
DIGEST_BYTES: Final = 32


class PolicyVersion(Struct, frozen=True, kw_only=True):
    """One immutable weight set: `version` is never reused, `step` counts optimiser steps in its lineage."""

    policy: Annotated[str, Meta(max_length=128)]
    version: int
    parent: int = 0
    step: int = 0
    root: Annotated[bytes, Meta(max_length=DIGEST_BYTES)] = b""


class TensorEntry(Struct, frozen=True, kw_only=True):
    """One tensor: `dtype` in safetensors' names, `size` in bytes, `digests` of its tiles in order."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    size: int
    digests: tuple[bytes, ...]


class Manifest(Struct, frozen=True, kw_only=True):
    """All tensors of one version, in the publisher's order."""

    run_id: str
    version: PolicyVersion
    tile_bytes: int
    tensors: tuple[TensorEntry, ...]


class VersionInfo(Struct, frozen=True, kw_only=True):
    run_id: str
    version: PolicyVersion
    size: int = 0
    tensors: int = 0
