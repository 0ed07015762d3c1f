"""Writes changed elements into a vLLM model in place, in checkpoint coordinates, where its own loader would put them.

What the loader does is observed (`observe`): it runs once on checkpoint tensors and parameters without data (the meta
device). Every operation on a view of a checkpoint tensor needs that view, and a plain copy from such a view into a view
of a parameter is a write that can be repeated for single elements. So fused, tied, sharded and expert weights need no
table of architectures, and loader operations of other kinds are reported, not guessed.

On a GPU only the changes cross to the device, and one group of tensors is allocated at a time.

Invariant: a dry run leaves the model's tensors and their attributes unchanged, also if it fails. Nothing is written
before every rank of an engine reported no `obstacle` and the changes were checked (`version_updates.why_not`). If vLLM
still refuses before its first write, the weights are unchanged.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

import torch
from safetensors import safe_open
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from vllm.model_executor.layers.attention import MLAAttention
from vllm.model_executor.model_loader.checkpoint_weight_patch import (
    CheckpointWeightPatch,
    load_checkpoint_weight_patches,
)
from vllm.model_executor.model_loader.reload.layerwise import _get_original_loader, get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import restore_layer_on_meta, to_meta_tensor

from ebbtide.errors import InvalidRequest
from ebbtide.rollout_worker.engine import Boxes
from ebbtide.rollout_worker.engine.vllm.version_updates import INDICES, VALUES, union, viewed, whole
from ebbtide.types.weights import Box

#: Bytes of checkpoint tensors that are staged on the device at once, unless one tensor alone is larger.
_STAGED: Final = 256 << 20
#: Elements that identify each copy: enough to tell weights in another order apart.
_SAMPLES: Final = 64

Entry = tuple[torch.dtype, torch.Size]


class LoaderView(NamedTuple):
    """Elements of a tensor, by strides."""

    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "LoaderView":
        return cls(int(tensor.storage_offset()), tuple(tensor.shape), tuple(tensor.stride()))


class LoaderWrite(NamedTuple):
    """A plain copy from the view `source` of the checkpoint tensor `name` to `target` of the model's `parameter`."""

    name: str
    source: LoaderView
    parameter: str
    target: LoaderView


@dataclass
class LoaderMap:
    """The observations of a dry run."""

    reads: dict[str, list[Box]] = field(default_factory=dict)
    writes: list[LoaderWrite] = field(default_factory=list)
    #: Why a tensor or a parameter is not made of plain copies alone, by its name.
    odd: dict[str, str] = field(default_factory=dict)
    reached: set[str] = field(default_factory=set)

    @property
    def boxes(self) -> Boxes:
        return {name: union(boxes) for name, boxes in self.reads.items()}


def observe(model: torch.nn.Module, tensors: Mapping[str, tuple[torch.dtype, Sequence[int]]]) -> LoaderMap:
    """Run `model.load_weights` dry on a checkpoint of `tensors` (name: dtype, shape).

    Raises `InvalidRequest` naming the tensor at which the loader asks for values, or the parameter that it leaves out:
    everything may be needed then.
    """
    source = {name: torch.empty(tuple(shape), dtype=dtype, device="meta") for name, (dtype, shape) in tensors.items()}
    at = ""

    def given() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal at
        for name, tensor in source.items():
            at = name
            yield name, tensor

    tied = aliases(model)
    with _without_data(model), torch.no_grad():
        targets = dict(model.named_parameters(remove_duplicate=False))
        observer = _Observer(source, targets | dict(model.named_buffers()))
        try:
            with observer:
                cast("Any", model).load_weights(given())
        except Exception as error:
            raise InvalidRequest(f"the model's loader cannot be run dry on {at}: {error}", field="weights") from error
    seen = observer.seen
    if left := [name for name, one in targets.items() if not {observer.known(one), tied.get(name)} & seen.reached]:
        raise InvalidRequest(f"a dry run of the model's loader leaves {left[0]} out", field="weights")
    return seen


def aliases(model: torch.nn.Module) -> dict[str, str]:
    """The first name of each parameter that has several, by each of the others."""
    first: dict[int, str] = {}
    names = ((name, first.setdefault(id(one), name)) for name, one in model.named_parameters(remove_duplicate=False))
    return {name: earlier for name, earlier in names if name != earlier}


@contextmanager
def _without_data(model: torch.nn.Module) -> Iterator[None]:
    """Give all layers the tensors from before the weights were loaded, on the meta device."""
    kept = [
        (layer, dict(layer._parameters), dict(layer._buffers), set(layer._non_persistent_buffers_set))  # noqa: SLF001
        for layer in model.modules()
    ]
    try:
        for layer, *_ in kept:
            restore_layer_on_meta(layer, get_layerwise_info(layer))
            _prepare(layer)
        yield
    finally:
        for layer, parameters, buffers, fleeting in kept:
            every: list[tuple[Any, Any]] = [(layer._parameters, parameters), (layer._buffers, buffers)]  # noqa: SLF001
            for own, before in every:  # keeps the dictionaries: compiled code may refer to them
                own.clear()
                own.update(before)
            layer._non_persistent_buffers_set = fleeting  # noqa: SLF001


def _prepare(layer: torch.nn.Module) -> None:
    """Replace each tensor of `layer` by one without data that vLLM does not keep, with its original loader."""
    every: tuple[dict[str, Any], ...] = (layer._parameters, layer._buffers)  # noqa: SLF001
    for own in every:
        for name, one in own.items():
            if one is not None:
                own[name] = to_meta_tensor(one)  # vLLM leaves some with data, such as biases
                if hasattr(one, "weight_loader"):
                    own[name].weight_loader = _get_original_loader(one)


class _Observer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes reads of checkpoint tensors, which it recognises by their storage, as views share it."""

    def __init__(self, checkpoint: Mapping[str, torch.Tensor], parameters: Mapping[str, torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen = LoaderMap(reads={name: [] for name in checkpoint})
        self._shapes = {name: tuple(tensor.shape) for name, tensor in checkpoint.items()}
        self._names = {_storage(tensor): name for name, tensor in checkpoint.items()}
        self._parameters: dict[int, str] = {}
        for name, tensor in parameters.items():
            self._parameters.setdefault(_storage(tensor), name)

    def known(self, target: torch.Tensor) -> str | None:
        """The first name of the parameter that `target` is, or is part of."""
        return self._parameters.get(_storage(target))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten.copy_.default:
            self._copied(args[0], args[1])
            return args[0]
        out = func(*args, **kwargs)
        if not func.is_view:
            for tensor in tree_leaves((args, kwargs)):
                if isinstance(tensor, torch.Tensor) and (name := self._names.get(_storage(tensor))) is not None:
                    self._read(name, LoaderView.of(tensor))
                    self.seen.odd.setdefault(name, f"goes through {func} on its way")
        return out

    def _copied(self, target: torch.Tensor, source: torch.Tensor) -> None:
        parameter = self.known(target)
        name = self._names.get(_storage(source))
        if parameter is not None:
            self.seen.reached.add(parameter)
        if name is None:
            self.seen.odd.setdefault(parameter or "something", "is made of what was computed from a checkpoint")
            return
        self._read(name, LoaderView.of(source))
        if parameter is None:
            self.seen.odd.setdefault(name, "is copied to what is no parameter")
        elif source.shape != target.shape:
            self.seen.odd.setdefault(name, f"is spread over {parameter}")
        elif not (source.is_floating_point() and target.is_floating_point()):
            self.seen.odd.setdefault(name, "is not of floating point")
        else:
            self.seen.writes.append(LoaderWrite(name, LoaderView.of(source), parameter, LoaderView.of(target)))

    def _read(self, name: str, view: LoaderView) -> None:
        shape = self._shapes[name]
        self.seen.reads[name].append(viewed(shape, *view) or whole(shape))


def _storage(tensor: torch.Tensor) -> int:
    """Identifies the storage: the same for all views of one tensor, unique while the tensor lives."""
    return int(tensor.untyped_storage()._cdata)  # noqa: SLF001


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


def write_in_place(model: torch.nn.Module, changes: Path, entries: Mapping[str, Entry], skipped: frozenset[str]) -> str:
    """Write `changes`, relative to tensors of these `entries`; `skipped` names share their parameter with another.

    Returns why vLLM refused before its first write; empty if all is written. Raises `TornUpdate`.
    """
    device = next(model.parameters()).device
    watched = _Watched(model)
    try:
        with safe_open(changes, framework="pt") as file:
            names = sorted({name.removesuffix(INDICES).removesuffix(VALUES) for name in file.keys()} - skipped)  # noqa: SIM118
            for group in _staged({name: entries[name] for name in names}):
                patches = [_patch(file, name, entries[name], device) for name in group]
                load_checkpoint_weight_patches(watched, patches, validate_unique_indices=False)
    except Exception as error:
        if watched.begun:
            raise TornUpdate(str(error)) from error
        return str(error)
    return ""


def _staged(entries: Mapping[str, Entry]) -> Iterator[list[str]]:
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
