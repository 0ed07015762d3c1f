"""Weights as bytes: tensors with safetensors' dtypes, cut into tiles, listed in a manifest under one root digest.

Pure functions over numpy arrays and bytes: nothing here waits, reads a clock or touches a file.
"""

from ebbtide.weights.assemble import Assembly
from ebbtide.weights.manifest import Limits, build_manifest, check_manifest, root_digest, seal_manifest
from ebbtide.weights.parts import ManifestJoiner, ManifestPart, split_manifest
from ebbtide.weights.tensors import NamedTensor, as_array, named_tensor
from ebbtide.weights.tiles import check_tile, describe, slice_tiles, tile_digest, tile_sizes

__all__ = [
    "Assembly",
    "Limits",
    "ManifestJoiner",
    "ManifestPart",
    "NamedTensor",
    "as_array",
    "build_manifest",
    "check_manifest",
    "check_tile",
    "describe",
    "named_tensor",
    "root_digest",
    "seal_manifest",
    "slice_tiles",
    "split_manifest",
    "tile_digest",
    "tile_sizes",
]
