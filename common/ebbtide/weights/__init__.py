"""Turns weights into bytes: tensors with safetensors' dtypes, cut into tiles, listed in a manifest under a root digest.

Pure functions over numpy arrays and bytes: nothing here waits or reads a clock, and only `read_config` and `end_tokens`
read files.
"""

from ebbtide.weights.fetch_plan import Place, Planner, TileTask, Way, places
from ebbtide.weights.geometry import FileLayout, places_of
from ebbtide.weights.manifest import (
    ManifestLimits,
    Signer,
    blob_sizes,
    build_manifest,
    check_manifest,
    check_patch,
    check_patch_signature,
    check_signature,
    patch_root,
    patched_tiles,
    root_digest,
    same_geometry,
    seal_manifest,
    seal_patch,
)
from ebbtide.weights.manifest_parts import (
    ManifestJoiner,
    ManifestPart,
    PatchJoiner,
    PatchPart,
    mark_missing,
    read_missing,
    split_manifest,
    split_patch,
    staged_sizes,
)
from ebbtide.weights.model_config import check_config, end_tokens, read_config
from ebbtide.weights.tensors import NamedTensor, as_array, named_tensor
from ebbtide.weights.tiles import check_tile, describe, slice_tiles, tile_digest, tile_size, tile_sizes

__all__ = [
    "FileLayout",
    "ManifestJoiner",
    "ManifestLimits",
    "ManifestPart",
    "NamedTensor",
    "PatchJoiner",
    "PatchPart",
    "Place",
    "Planner",
    "Signer",
    "TileTask",
    "Way",
    "as_array",
    "blob_sizes",
    "build_manifest",
    "check_config",
    "check_manifest",
    "check_patch",
    "check_patch_signature",
    "check_signature",
    "check_tile",
    "describe",
    "end_tokens",
    "mark_missing",
    "named_tensor",
    "patch_root",
    "patched_tiles",
    "places",
    "places_of",
    "read_config",
    "read_missing",
    "root_digest",
    "same_geometry",
    "seal_manifest",
    "seal_patch",
    "slice_tiles",
    "split_manifest",
    "split_patch",
    "staged_sizes",
    "tile_digest",
    "tile_size",
    "tile_sizes",
]
