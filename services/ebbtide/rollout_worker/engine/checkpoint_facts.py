"""Reads a checkpoint directory's facts from its JSON files and safetensors headers alone."""

import hashlib
import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from ebbtide.errors import InvalidRequest
from ebbtide.hub_models import model_folder, no_directory
from ebbtide.rollout_worker.engine import Shapes

#: safetensors refuses larger headers too.
_MAX_HEADER: Final = 100_000_000


def check_directory(path: str) -> Path:
    """The directory `path`, or that of a name of the Hub. Raises `InvalidRequest` unless it holds a Hugging Face
    checkpoint in safetensors."""
    if not path:
        raise InvalidRequest(
            "is required: give a Hugging Face checkpoint directory or a name of the Hub", field="model"
        )
    root = model_folder(path)
    if not root.is_dir():
        raise InvalidRequest(no_directory(path), field="model")
    if not (root / "config.json").is_file():
        raise InvalidRequest(f"{path} is no checkpoint directory: it has no config.json", field="model")
    if not any(root.glob("*.safetensors")):
        raise InvalidRequest(
            f"{path} has no safetensors weights; convert them, other formats are not read", field="model"
        )
    return root


def tensor_shapes(root: Path) -> Shapes:
    """Names and shapes of all tensors of the checkpoint. Raises `InvalidRequest` for an unreadable header."""
    return {name: tuple(entry["shape"]) for name, entry in _tensors(root)}


def tensor_dtypes(root: Path) -> dict[str, str]:
    """The data types of all tensors of the checkpoint, in safetensors' names."""
    return {name: entry["dtype"] for name, entry in _tensors(root)}


def weights_bytes(root: Path) -> int:
    """Bytes of all tensors of the checkpoint."""
    return sum(end - begin for _, entry in _tensors(root) for begin, end in [entry["data_offsets"]])


def _tensors(root: Path) -> Iterator[tuple[str, Any]]:
    for file in sorted(root.glob("*.safetensors")):
        yield from ((name, entry) for name, entry in header(file).items() if name != "__metadata__")


def architecture(shapes: Shapes) -> str:
    """A digest that two checkpoints share when their tensors have the same names and shapes."""
    lines = "\n".join(f"{name} {list(shape)}" for name, shape in sorted(shapes.items()))
    return hashlib.blake2b(lines.encode(), digest_size=16).hexdigest()


def misfits(found: Mapping[str, Sequence[int]], wanted: Mapping[str, Sequence[int]]) -> str:
    """Up to three tensors that only one side has, or whose shapes differ; empty if both agree."""
    names = sorted(found.keys() ^ wanted.keys())
    names = names or sorted(name for name, shape in found.items() if tuple(shape) != tuple(wanted[name]))
    return ", ".join(names[:3])


def header(file: Path) -> dict[str, Any]:
    """The header of a safetensors file. Raises `InvalidRequest` for any other file."""
    try:
        with file.open("rb") as source:
            (size,) = struct.unpack("<Q", source.read(8))
            if size > _MAX_HEADER:
                raise InvalidRequest(f"{file} has a safetensors header of {size} bytes", field="model")
            found: dict[str, Any] = json.loads(source.read(size))
    except (struct.error, ValueError) as error:
        raise InvalidRequest(f"{file} is not a safetensors file: {error}", field="model") from None
    return found
