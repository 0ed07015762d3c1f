"""Names the tensors of a network as its checkpoints do, and as vLLM loads them.

`transformers` keeps some tensors in another form than files: the experts of a mixture lie in one tensor of three
dimensions, (experts, rows, columns), and each has two or three matrices of its own in a file. What lies where is asked
of transformers itself: its conversion for saving is applied to numbers of elements in place of the elements.

Invariant: every element of the network's tensors is in one checkpoint tensor. A network whose conversion does more than
cut rows apart and rename keeps its own names.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers.core_model_loading import revert_weight_conversion

from ebbtide.telemetry import get_logger
from ebbtide.weights.tensors import Part

log = get_logger(__name__)


class CheckpointTensor(NamedTuple):
    """A tensor of a checkpoint, and where the network has it."""

    name: str  # in checkpoints
    source: str  # the network's own name
    expert: int = -1  # of the source's first dimension; -1: it is the whole source
    start: int = 0  # first of the expert's rows
    rows: int = 0

    def of(self, source: Tensor, first: int = 0) -> Tensor:
        """Returns the view of it in its source, of which experts from number `first` on are given."""
        return source if self.expert < 0 else source[self.expert - first, self.start : self.start + self.rows]


class _UnknownForm(Exception):
    """transformers makes this tensor of the network's in a way that is not known here."""


def own_tensors(network: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Lists the network's tensors by its own names, tied ones once; sharded ones are DTensors."""
    seen: set[int] = set()
    for name, tensor in network.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield name, tensor.detach()


def checkpoint_tensors(network: nn.Module) -> list[CheckpointTensor]:
    """Returns what the network's checkpoint holds."""
    own = {name: tuple(tensor.shape) for name, tensor in own_tensors(network)}
    numbered = {name: _numbers(shape) for name, shape in own.items()}
    first, at = dict[str, int](), 0
    for name, rows in numbered.items():
        first[name], at = at, at + rows.numel()
        rows.add_(first[name])
    with torch.no_grad():
        named = revert_weight_conversion(network, numbered)
    if named is numbered:
        return [CheckpointTensor(name, name) for name in own]
    ends = {name: first[name] + rows.numel() for name, rows in numbered.items()}
    try:
        return [_located(name, rows, own, first, ends) for name, rows in named.items()]
    except _UnknownForm as error:
        log.warning("tensors keep their names in the network: vLLM may know others", tensor=str(error))
        return [CheckpointTensor(name, name) for name in own]


#: Columns that stand for a row's. With one alone, transformers would take the dimension away.
_COLUMNS: Final = 2


def _numbers(shape: tuple[int, ...]) -> Tensor:
    """Numbers a vector's elements, or the elements of the first columns of a matrix, or of several."""
    kept = shape if len(shape) < 2 else (*shape[:-1], _COLUMNS)
    return torch.arange(torch.Size(kept).numel()).reshape(kept)


def _located(
    name: str, rows: Tensor, own: Mapping[str, tuple[int, ...]], first: Mapping[str, int], ends: Mapping[str, int]
) -> CheckpointTensor:
    flat = rows.reshape(-1)
    begin = int(flat[0])
    source = next((one for one in first if first[one] <= begin < ends[one]), "")
    whole = begin == first[source] and len(flat) == ends[source] - first[source]
    if not torch.equal(flat, torch.arange(begin, begin + len(flat))) or not source:
        raise _UnknownForm(name)
    shape = own[source]
    if whole:
        return CheckpointTensor(name, source)
    if len(shape) != 3 or rows.dim() != 2 or rows.shape[1] != _COLUMNS:
        raise _UnknownForm(name)
    expert, start = divmod((begin - first[source]) // _COLUMNS, shape[1])
    if start + len(rows) > shape[1]:
        raise _UnknownForm(name)
    return CheckpointTensor(name, source, expert, start, len(rows))


def own_experts(source: Tensor) -> tuple[Tensor, int]:
    """Returns the experts of a source that this rank has, and the number of the first."""
    if not isinstance(source, DTensor):
        return source, 0
    _, offset = compute_local_shape_and_global_offset(source.shape, source.device_mesh, source.placements)
    return source.to_local(), int(offset[0])


def published(
    network: nn.Module, named: Sequence[CheckpointTensor], dtype: torch.dtype | None = None
) -> Iterator[tuple[str, Any]]:
    """Lists the network's tensors as `named`, parameters in `dtype` (None: their own). Buffers keep theirs: an engine
    routes by some of them in float32.

    Of sharded experts, it lists those of this rank, as `Part`s: each is whole on one rank.
    """

    parameters = {name for name, _ in network.named_parameters(remove_duplicate=False)}

    def cast(tensor: Tensor, source: str) -> Tensor:
        return tensor.to(dtype) if dtype and source in parameters and tensor.is_floating_point() else tensor

    own = dict(own_tensors(network))
    for one in named:
        source = own[one.source]
        if one.expert < 0 or not isinstance(source, DTensor):
            yield one.name, cast(one.of(source), one.source)
            continue
        experts, first = own_experts(source)
        if first <= one.expert < first + len(experts):
            yield one.name, Part(cast(one.of(experts, first), one.source))
