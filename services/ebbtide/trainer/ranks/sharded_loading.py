"""Loads a sharded network from files: each rank reads only its own slices.

Tensors are read by their names in the network. If the files use other names (transformers renames those of some
architectures), or weights are tied, the whole network is loaded first and sharded then.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoConfig, AutoModelForCausalLM

from ebbtide.claimed_runs.model_directory import check_model_directory
from ebbtide.trainer.learning.network import Network, check_vocabulary, load_network
from ebbtide.trainer.ranks.checkpoint_shards import read_weights
from ebbtide.trainer.ranks.network_sharding import own_tensors, shard


def load_sharded(directory: Path, mesh: DeviceMesh, *, dtype: str, device: str) -> Network:
    """Loads the network in `directory` like `load_network`, but sharded. Raises `InvalidRequest`."""
    check_model_directory(directory)
    network = _blank(directory)
    if network is None:
        return shard(load_network(directory), mesh, dtype=dtype)
    check_vocabulary(directory, network)
    shard(network, mesh, dtype=dtype)
    buffers = {name: buffer.clone() for name, buffer in network.named_buffers()}
    network.to_empty(device=device)
    for name, buffer in network.named_buffers():
        buffer.copy_(buffers[name])
    with torch.no_grad():
        read_weights(directory, dict(own_tensors(network)))
    return network.eval()


def _blank(directory: Path) -> Network | None:
    """Makes the network without memory for weights; None unless the files have each of its tensors."""
    config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    if getattr(config, "tie_word_embeddings", False):
        return None
    with _parameters_on_meta():
        network = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False)
    network.config.architectures = [type(network).__name__]
    names = {name for name, _ in own_tensors(network)}
    return network if names <= _names(directory) else None


def _names(directory: Path) -> set[str]:
    found: set[str] = set()
    for path in directory.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            found.update(file.keys())
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
