"""Checks the files of a version before generation stops for it, in the worker's process and on its CPU.

Engine processes read the same files.

`weights`: a safetensors file of all tensors. `changes`: per changed tensor NAME the tensors `NAME.indices` (i64, one
dimension, ascending positions in the flat tensor) and `NAME.values` (its data type), relative to the version before.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from ebbtide.errors import InvalidRequest
from ebbtide.rollout_worker.engine import Shapes
from ebbtide.rollout_worker.engine.checkpoint_facts import misfits

INDICES: Final = ".indices"
VALUES: Final = ".values"
#: Types that a loader turns into each other.
_FLOATS: Final = frozenset({"F64", "F32", "F16", "BF16"})


class ChangeEntry(NamedTuple):
    """One tensor, by a file's header."""

    dtype: str  # in safetensors' names
    shape: tuple[int, ...]


class InstallMethod(NamedTuple):
    """How a version gets into an engine: in place, or else by a reload."""

    in_place: bool
    reason: str = ""  # for the reload, if there were changes


def how_to_install(changes: str | None, obstacles: Sequence[str]) -> InstallMethod:
    """`changes`: why they cannot be applied; empty: they can; None: there are none. `obstacles`: each rank's."""
    if changes is None:
        return InstallMethod(in_place=False)
    reason = next((reason for reason in [*obstacles, changes] if reason), "")
    return InstallMethod(in_place=not reason, reason=reason)


def check_weights(weights: Path, shapes: Shapes, dtypes: Mapping[str, str]) -> dict[str, ChangeEntry]:
    """The tensors in `weights`. Raises `InvalidRequest` unless they are exactly those of the model."""
    try:
        with _open(weights) as file:
            found = {name: _entry(file.get_slice(name)) for name in file.keys()}  # noqa: SIM118
    except (OSError, ValueError) as error:
        raise InvalidRequest(f"cannot be read: {error}", field="weights") from error
    if names := misfits({name: entry.shape for name, entry in found.items()}, shapes):
        raise InvalidRequest(f"are of another architecture: see {names}", field="weights")
    for name, entry in found.items():
        if entry.dtype != dtypes[name] and not {entry.dtype, dtypes[name]} <= _FLOATS:
            raise InvalidRequest(f"{name} is {entry.dtype}, where the model's is {dtypes[name]}", field="weights")
    return found


def why_not(changes: Path, entries: Mapping[str, ChangeEntry]) -> str:
    """Why `changes` cannot be applied to weights of these `entries` in place; empty if they can.

    This also finds faults that vLLM would find only while it is writing: it marks unchanged elements by NaN.
    """
    try:
        with _open(changes) as file:
            names = set(file.keys())
            for name in sorted({name.removesuffix(INDICES).removesuffix(VALUES) for name in names}):
                if name not in entries or not {name + INDICES, name + VALUES} <= names:
                    return f"the changes of {name} are not those of a tensor"
                if found := _fault(file, name, entries[name]):
                    return f"the changes of {name} {found}"
    except (OSError, ValueError) as error:
        return f"the changes cannot be read: {error}"
    return ""


def _fault(file: Any, name: str, entry: ChangeEntry) -> str:
    """The fault in the changes of one tensor, a verb first; empty if there is none."""
    import torch

    if _entry(file.get_slice(name + VALUES)).dtype != entry.dtype:
        return "are of another type than it"
    indices, values = file.get_tensor(name + INDICES), file.get_tensor(name + VALUES)
    if indices.dtype != torch.int64 or indices.ndim != 1 or indices.shape != values.shape:
        return "lack a position for each value"
    if len(indices) and not (
        indices[0] >= 0 and indices[-1] < torch.Size(entry.shape).numel() and (indices[1:] > indices[:-1]).all()
    ):
        return "have positions that do not ascend within it"
    if not values.is_floating_point() or values.isnan().any():
        return "are not all numbers of floating point"
    return ""


def _open(path: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise ValueError(str(error)) from None


def _entry(part: Any) -> ChangeEntry:
    return ChangeEntry(part.get_dtype(), tuple(part.get_shape()))
