"""Writes a checkpoint's tensors from several ranks, and reads them on any number of ranks.

The network's files hold whole tensors in the form of `transformers` (`model-00001-of-00002.safetensors` and an index).
The files are dealt to the ranks, and each rank gathers one file at a time. The optimiser's files hold each rank's own
shards, with their places, in the safetensors form of torch.distributed.checkpoint. Only its planners, reader and writer
are used: its exchange between ranks pickles.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.tensor import DTensor

from ebbtide.runtime import fsync
from ebbtide.trainer.ranks.network_sharding import local, own_tensors, whole

_INDEX: Final = "model.safetensors.index.json"
#: Approximate size of a file of weights, which a rank holds in host memory while it writes the file.
_FILE_BYTES: Final = 2 << 30
#: Finds the number of the parameter in the name of a tensor of the optimiser's state.
_STATE: Final = re.compile(r"/optimizer/state/(\d+)/")


def weight_files(network: nn.Module, ranks: int, file_bytes: int = _FILE_BYTES) -> list[list[str]]:
    """Deals tensor names to files, equally on all ranks; each rank has files if there are enough tensors."""
    sizes = {name: tensor.numel() * tensor.element_size() for name, tensor in own_tensors(network)}
    total, before = sum(sizes.values()), 0
    count = ranks * math.ceil(total / (file_bytes * ranks))
    files: list[list[str]] = [[] for _ in range(count)]
    for name, size in sizes.items():
        files[(2 * before + size) * count // (2 * total)].append(name)  # by the place of its middle
        before += size
    return [names for names in files if names]


def write_weights(network: nn.Module, folder: Path, rank: int, ranks: int) -> None:
    """Writes this rank's files durably; all ranks call it. Rank 0 writes the index."""
    files, tensors = weight_files(network, ranks), dict(own_tensors(network))
    for first in range(0, len(files), ranks):
        mine: dict[str, Tensor] = {}
        for owner, names in enumerate(files[first : first + ranks]):
            for name in names:
                full = whole(tensors[name])
                if owner == rank:
                    mine[name] = full.cpu().contiguous()
                del full
        if mine:
            path = folder / _file_name(first + rank, len(files))
            save_file(mine, path, metadata={"format": "pt"})
            fsync(path)
    if rank == 0:
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        named = {name: _file_name(number, len(files)) for number, names in enumerate(files) for name in names}
        body = {"metadata": {"total_size": size}, "weight_map": named}
        (folder / _INDEX).write_text(json.dumps(body, indent=2, sort_keys=True), encoding="utf-8")


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


def read_shards(folder: Path, parameters: Sequence[Tensor]) -> dict[str, Tensor]:
    """Reads this rank's shards of the optimiser's tensors, from any number of files.

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
    found = {name: _room(name, entry.size, entry.properties.dtype, parameters) for name, entry in shapes.items()}
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
