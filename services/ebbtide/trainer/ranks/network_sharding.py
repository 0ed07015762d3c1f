"""Shards a network over the ranks by FSDP2: each holds a share of each tensor, and gathers a layer at a time."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from ebbtide.trainer.learning.network import Network


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


def own_tensors(network: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Lists the network's tensors by their names in checkpoints, tied ones once; sharded ones are DTensors."""
    seen: set[int] = set()
    for name, tensor in network.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield name, tensor.detach()


def whole(tensor: Any) -> Tensor:
    """Returns the whole tensor. All ranks call this together for a sharded one."""
    found: Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return found


def local(tensor: Any) -> Tensor:
    """Returns this rank's share of a tensor."""
    found: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return found
