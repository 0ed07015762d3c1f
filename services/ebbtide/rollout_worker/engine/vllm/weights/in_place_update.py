"""Writes changed elements into a vLLM model in place, in checkpoint coordinates.

On a GPU only the changes cross to the device, and one group of tensors is allocated at a time.
Invariant: nothing is written before every rank of an engine reported no `obstacle` and the changes were checked
(`version_files.why_not`). If vLLM still refuses before its first write, the weights are unchanged.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import safe_open
from vllm.model_executor.layers.attention import MLAAttention
from vllm.model_executor.model_loader.checkpoint_weight_patch import (
    CheckpointWeightPatch,
    load_checkpoint_weight_patches,
)

from ebbtide.rollout_worker.engine.vllm.weights.loader_map import LoaderMap, LoaderView
from ebbtide.rollout_worker.engine.vllm.weights.version_files import INDICES, VALUES

#: Bytes of checkpoint tensors that are staged on the device at once, unless one tensor alone is larger.
_STAGED: Final = 256 << 20
#: Elements that identify each copy: enough to tell weights in another order apart.
_SAMPLES: Final = 64

Entry = tuple[torch.dtype, torch.Size]


class TornUpdate(Exception):
    """vLLM failed after it may have written: the weights are a mixture."""


def obstacle(model: torch.nn.Module, quantised: bool, seen: LoaderMap, root: Path) -> str:
    """Why elements cannot be replaced in place in this process; empty if they can. `root`: the loaded checkpoint.

    Values that a model computes from its weights after loading would stay those of the old ones. So every element that
    a loader copies must be in the live parameter where the loader puts it, and nothing may be derived from it.
    """
    if quantised:
        return "its weights are quantised after they were loaded"
    if all(parameter.device.type == "cpu" for parameter in model.parameters()):
        return "CPU builds pack their layers"
    if any(isinstance(layer, MLAAttention) for layer in model.modules()):
        return "its attention keeps products of its weights"
    if hasattr(model, "process_weights_after_loading"):
        return "the model computes on its weights after they were loaded"
    if seen.odd:
        name, reason = next(iter(seen.odd.items()))
        return f"{name} {reason}"
    return moved(model, seen, root)


def moved(model: torch.nn.Module, seen: LoaderMap, root: Path) -> str:
    """Names a parameter without the checkpoint's elements where the loader copies them; empty: there is none."""
    live = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
    for file in sorted(root.glob("*.safetensors")):
        with safe_open(file, framework="pt") as checkpoint:
            names = set(checkpoint.keys())
            for write in seen.writes:
                if write.name in names:
                    want = _sample(checkpoint.get_tensor(write.name), write.source)
                    have = _sample(live[write.parameter], write.target) if write.parameter in live else None
                    if want is None or have is None or not torch.equal(have, want.to(have.dtype)):
                        return f"{write.parameter} is kept in another form than it is loaded in"
    return ""


def _sample(tensor: torch.Tensor, view: LoaderView) -> torch.Tensor | None:
    """Elements spread over `view` of `tensor`, on the CPU; None if it has no such view."""
    start = tensor.storage_offset()
    length = tensor.untyped_storage().nbytes() // tensor.element_size() - start
    flat = tensor.detach().as_strided((length,), (1,), start)
    count = torch.Size(view.size).numel()
    at = torch.linspace(0, count - 1, min(count, _SAMPLES), dtype=torch.float64).long()
    places = torch.full_like(at, view.offset)
    for extent, step in zip(reversed(view.size), reversed(view.stride), strict=True):
        places += at % extent * step
        at //= extent
    if len(places) and int(places.max()) >= len(flat):
        return None
    return flat[places.to(flat.device)].cpu()


class _Watched:
    """Stands in for the model, and notes when vLLM's loader may begin to write."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.begun = False

    def load_weights(self, weights: Any) -> Any:
        self.begun = True
        return self._model.load_weights(weights)


def apply(model: torch.nn.Module, changes: Path, entries: Mapping[str, Entry], skipped: frozenset[str]) -> str:
    """Write `changes`, relative to tensors of these `entries`; `skipped` names share their parameter with another.

    Returns why vLLM refused before its first write; empty if all is written. Raises `TornUpdate`.
    """
    device = next(model.parameters()).device
    watched = _Watched(model)
    try:
        with safe_open(changes, framework="pt") as file:
            names = sorted({name.removesuffix(INDICES).removesuffix(VALUES) for name in file.keys()} - skipped)  # noqa: SIM118
            for group in groups({name: entries[name] for name in names}):
                patches = [_patch(file, name, entries[name], device) for name in group]
                load_checkpoint_weight_patches(watched, patches, validate_unique_indices=False)
    except Exception as error:
        if watched.begun:
            raise TornUpdate(str(error)) from error
        return str(error)
    return ""


def groups(entries: Mapping[str, Entry]) -> Iterator[list[str]]:
    """Names in groups of at most `_STAGED` bytes of tensors, or of one tensor."""
    lot, size = list[str](), 0
    for name, (dtype, shape) in entries.items():
        more = shape.numel() * dtype.itemsize
        if lot and size + more > _STAGED:
            yield lot
            lot, size = [], 0
        lot.append(name)
        size += more
    if lot:
        yield lot


def _patch(file: Any, name: str, entry: Entry, device: torch.device) -> CheckpointWeightPatch:
    dtype, shape = entry
    indices, values = file.get_tensor(name + INDICES), file.get_tensor(name + VALUES)
    if shape.numel() <= torch.iinfo(torch.int32).max:
        indices = indices.to(torch.int32)
    return CheckpointWeightPatch(name, tuple(shape), dtype, values.to(device), indices.to(device))
