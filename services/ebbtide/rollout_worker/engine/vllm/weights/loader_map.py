"""Observes which slices of which checkpoint tensors a model's own loader reads, and into which parameters.

The loader runs once on checkpoint tensors and parameters without data (the meta device): every operation on a view of a
checkpoint tensor needs that view, and a plain copy from such a view into a view of a parameter is a write that can be
repeated for single elements. So fused, tied, sharded and expert weights need no table of architectures, and loader
operations of other kinds are reported, not guessed.

Invariant: a dry run leaves the model's tensors and their attributes unchanged, also if it fails.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from vllm.model_executor.model_loader.reload.layerwise import _get_original_loader, get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import restore_layer_on_meta, to_meta_tensor

from ebbtide.errors import InvalidRequest
from ebbtide.rollout_worker.engine.vllm.weights.tensor_boxes import Boxes, union, viewed, whole
from ebbtide.types.weights import Box


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
