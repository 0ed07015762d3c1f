"""Shards a network over the ranks by FSDP2, writes its checkpoint from several ranks, and loads it on any number.

Each rank holds a share of each tensor, and gathers a layer at a time.

The network's files hold whole tensors in the form of `transformers` (`model-00001-of-00002.safetensors` and an index).
The files are dealt to the ranks, and each rank gathers one file at a time. The optimiser's files hold each rank's own
shards, with their places, in the safetensors form of torch.distributed.checkpoint. Only its planners, reader and writer
are used: its exchange between ranks pickles.

When a network is loaded, each rank reads only its own slices, and of a mixture its own experts, by the names that
transformers gives them in files. If the files use other names, or weights are tied, the whole network is loaded first
and sharded then.
"""

import contextlib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM

from ebbtide.errors import InvalidRequest
from ebbtide.run_client import check_model_directory
from ebbtide.runtime import fsync
from ebbtide.trainer.learning.checkpoint_tensors import (
    CheckpointTensor,
    checkpoint_tensors,
    own_experts,
    own_tensors,
)
from ebbtide.trainer.learning.network import Network, check_vocabulary, load_network, make_savable
from ebbtide.trainer.learning.optimizer import to_host


def shard(network: Network, mesh: DeviceMesh, *, dtype: str) -> Network:
    """Shards each layer and the rest, in place. Weights and sums of gradients are float32; layers compute in `dtype`.

    Gradients are summed over ranks, not averaged: the loss is divided by the tokens of all ranks.
    """
    low = torch.bfloat16 if dtype == "bfloat16" else None
    policy = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for layer in (*_layers(network), network):
        fully_shard(layer, mesh=mesh, reshard_after_forward=True, mp_policy=policy)
    for module in network.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo supports nothing else
    return network


def _layers(network: nn.Module) -> list[nn.Module]:
    """Returns the decoder's layers: the network's longest list of modules; none without lists."""
    lists = (list(module.children()) for module in network.modules() if isinstance(module, nn.ModuleList))
    return max(lists, key=len, default=[])


def whole(tensor: Any) -> Tensor:
    """Returns the whole tensor. All ranks call this together for a sharded one."""
    found: Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return found


def local(tensor: Any) -> Tensor:
    """Returns this rank's share of a tensor."""
    found: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return found


INDEX: Final = "model.safetensors.index.json"
#: Approximate size of a file of weights, which a rank holds in host memory while it writes the file.
_FILE_BYTES: Final = 2 << 30
#: Finds the number of the parameter in the name of a tensor of the optimiser's state.
_STATE: Final = re.compile(r"/optimizer/state/(\d+)/")


def weight_files(network: nn.Module, ranks: int, file_bytes: int = _FILE_BYTES) -> list[list[str]]:
    """Deals the network's tensors by name to files, equally on all ranks; each rank has files if there are enough."""
    sizes = {name: tensor.numel() * tensor.element_size() for name, tensor in own_tensors(network)}
    total, before = sum(sizes.values()), 0
    count = ranks * math.ceil(total / (file_bytes * ranks))
    files: list[list[str]] = [[] for _ in range(count)]
    for name, size in sizes.items():
        files[(2 * before + size) * count // (2 * total)].append(name)  # by the place of its middle
        before += size
    return [names for names in files if names]


def gathered_files(network: nn.Module, rank: int, ranks: int) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Yields this rank's files of the network, by name, with host copies of their tensors. All ranks go through it to
    the end, as each tensor is gathered by all.
    """
    files, tensors = weight_files(network, ranks), dict(own_tensors(network))
    named = _by_source(network)
    for first in range(0, len(files), ranks):
        mine: dict[str, Tensor] = {}
        for owner, names in enumerate(files[first : first + ranks]):
            for name in names:
                full = whole(tensors[name])
                if owner == rank:
                    there = host_copy(full)
                    mine |= {one.name: one.of(there).contiguous() for one in named[name]}
                del full
        if mine:
            yield _file_name(first + rank, len(files)), mine


def weight_index(network: nn.Module, ranks: int) -> str:
    """Returns the index of the files that the ranks write."""
    files, named = weight_files(network, ranks), _by_source(network)
    size = sum(tensor.numel() * tensor.element_size() for _, tensor in own_tensors(network))
    places = {
        one.name: _file_name(number, len(files))
        for number, names in enumerate(files)
        for name in names
        for one in named[name]
    }
    body = {"metadata": {"total_size": size}, "weight_map": places}
    return json.dumps(body, indent=2, sort_keys=True)


def _by_source(network: nn.Module) -> dict[str, list[CheckpointTensor]]:
    named: dict[str, list[CheckpointTensor]] = {}
    for one in checkpoint_tensors(network):
        named.setdefault(one.source, []).append(one)
    return named


def host_copy(tensor: Tensor) -> Tensor:
    """Returns a copy of the tensor, of a sharded one's own part, in host memory."""
    if isinstance(tensor, DTensor):
        copy: Any = tensor.detach()
        copy._local_tensor = host_copy(copy._local_tensor)  # noqa: SLF001
        own: Tensor = copy
        return own
    return tensor.detach().to("cpu", copy=True)


def _file_name(number: int, count: int) -> str:
    return f"model-{number + 1:05d}-of-{count:05d}.safetensors"


def shard_name(rank: int) -> str:
    """Names the file of a rank, as torch.distributed.checkpoint does."""
    return f"shard-{rank + 1:05d}-model-00001-of-00001.safetensors"


def write_shards(tensors: Mapping[str, Tensor], folder: Path, rank: int) -> None:
    """Writes this rank's shards of `tensors` durably; rank 0 writes those that are not sharded."""
    own = {name: one for name, one in tensors.items() if (isinstance(one, DTensor) or rank == 0) and local(one).numel()}
    planner = DefaultSavePlanner(flatten_state_dict=False)
    planner.set_up_planner(own, is_coordinator=rank == 0)
    plan = planner.finish_plan(replace(planner.create_local_plan(), storage_data={"shard_index": rank + 1}))
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    writer.write_data(plan, planner).wait()
    if not plan.items:
        save_file({}, folder / shard_name(rank))
        fsync(folder / shard_name(rank))


def read_shards(folder: Path, parameters: Sequence[Tensor], *, in_host: bool = False) -> dict[str, Tensor]:
    """Reads this rank's shards of the optimiser's tensors, from any number of files; `in_host`: into host memory.

    Raises the errors of torch and safetensors for damaged files, and `ValueError` for incomplete tensors, whose missing
    values would be uninitialised memory.
    """
    reader: Any = HuggingFaceStorageReader(str(folder))
    metadata = reader.read_metadata()
    shapes = {name: entry for name, entry in metadata.state_dict_metadata.items() if name.startswith("/")}
    for name, entry in shapes.items():
        held, wanted = sum(math.prod(chunk.sizes) for chunk in entry.chunks), math.prod(entry.size)
        if held != wanted:
            raise ValueError(f"the shards of {name} hold {held} values, and it has {wanted}")
    found: dict[str, Tensor] = {}
    for name, entry in shapes.items():
        room = _room(name, entry.size, entry.properties.dtype, parameters)
        found[name] = to_host(room) if in_host else room
    _read(reader, metadata, found)
    return found


def read_weights(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Fills `tensors` by name from a network's files. Raises as `read_shards` does."""
    reader: Any = HuggingFaceStorageReader(str(folder))
    _read(reader, reader.read_metadata(), tensors)


def _read(reader: Any, metadata: Any, tensors: Mapping[str, Tensor]) -> None:
    wanted = {name: tensor for name, tensor in tensors.items() if local(tensor).numel()}
    planner = DefaultLoadPlanner(flatten_state_dict=False)
    planner.set_up_planner(wanted, metadata, is_coordinator=True)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    plan = planner.finish_plan(reader.prepare_local_plan(planner.create_local_plan()))
    reader.read_data(plan, planner).wait()


def _room(name: str, shape: torch.Size, dtype: torch.dtype, parameters: Sequence[Tensor]) -> Tensor:
    place = _STATE.match(name)
    if place is not None and int(place[1]) < len(parameters):
        parameter = parameters[int(place[1])]
        if parameter.shape == shape:
            return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
        if shape:  # a step's number has none
            raise ValueError(f"{name} is of shape {tuple(shape)}, and its parameter of {tuple(parameter.shape)}")
    return torch.empty(shape, dtype=dtype)


def load_sharded(directory: Path, mesh: DeviceMesh, *, dtype: str, device: str) -> Network:
    """Loads the network in `directory` like `load_network`, but sharded. Raises `InvalidRequest`."""
    check_model_directory(directory)
    with _readable(directory):
        network = _blank(directory)
    if network is None:
        return shard(load_network(directory), mesh, dtype=dtype)
    check_vocabulary(directory, network)
    make_savable(network)
    shard(network, mesh, dtype=dtype)
    buffers = {name: buffer.clone() for name, buffer in network.named_buffers()}
    network.to_empty(device=device)
    for name, buffer in network.named_buffers():
        buffer.copy_(buffers[name])
    with torch.no_grad(), _readable(directory):
        _fill(directory, network)
    return network.eval()


@contextlib.contextmanager
def _readable(directory: Path) -> Iterator[None]:
    """Raises `InvalidRequest` naming `model` for files that are no checkpoint of their network."""
    try:
        yield
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError) as error:
        raise InvalidRequest(f"{str(directory)!r} cannot be loaded: {error}", field="model") from error


def _fill(directory: Path, network: Network) -> None:
    """Reads this rank's slices of the network's tensors, and its experts."""
    own, files = dict(own_tensors(network)), _names(directory)
    apart = [one for one in checkpoint_tensors(network) if one.expert >= 0]
    if not {one.name for one in apart} <= files.keys():  # the files hold experts as the network does
        apart = []
    cut = {one.source for one in apart}
    whole = [one for one in checkpoint_tensors(network) if one.source not in cut]
    read_weights(directory, {one.name if one.name in files else one.source: own[one.source] for one in whole})
    by_file: dict[Path, list[CheckpointTensor]] = {}
    for one in apart:
        by_file.setdefault(files[one.name], []).append(one)
    for path, experts in by_file.items():
        with safe_open(path, framework="pt") as file:
            for one in experts:
                held, first = own_experts(own[one.source])
                if first <= one.expert < first + len(held):
                    one.of(held, first).copy_(file.get_tensor(one.name))


def _blank(directory: Path) -> Network | None:
    """Makes the network without memory for weights; None unless the files have each of its tensors."""
    config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    if getattr(config, "tie_word_embeddings", False):
        return None
    with _parameters_on_meta():
        network = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False)
    network.config.architectures = [type(network).__name__]
    files = _names(directory).keys()
    as_held = {name for name, _ in own_tensors(network)} <= files
    return network if as_held or {one.name for one in checkpoint_tensors(network)} <= files else None


def _names(directory: Path) -> dict[str, Path]:
    """The tensors in a network's files, and the file of each."""
    found: dict[str, Path] = {}
    for path in directory.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            found |= dict.fromkeys(file.keys(), path)
    return found


@contextlib.contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Makes new parameters without memory; buffers, which no file holds, are computed as usual."""
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: Any) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
