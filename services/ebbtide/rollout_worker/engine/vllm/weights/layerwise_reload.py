"""All weights of a vLLM model from full checkpoint tensors, layer by layer, whatever the model's layers make of them.

vLLM's layerwise reload does it, but for what CPU builds keep beside the parameters and it does not know of:

- An output layer that is tied to the embedding has no tensor of its own in a checkpoint, so the reload passes it by
  and its packed copy stays that of the old weights. It is packed like the embedding, which the reload does pack:
  it uses that copy.
- Expert layers are packed only when their kernel is first set up; at a reload unpacked weights would be copied over
  packed ones. Their kernels are set up anew.
- Input embeddings are packed for a multiplication that never comes, where there is an output layer of its own.
"""

from collections.abc import Iterable
from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

Tied = list[tuple[VocabParallelEmbedding, VocabParallelEmbedding]]


def tied_layers(model: torch.nn.Module) -> Tied:
    """Output layers with the embedding whose weight they share.

    Raises `ValueError` for one that has parameters besides: a reload would take it for one that was loaded, and copy
    what was never filled over the shared weight.
    """
    found: Tied = []
    owners: dict[int, VocabParallelEmbedding] = {}
    for name, layer in model.named_modules():
        if not isinstance(layer, VocabParallelEmbedding) or "weight" not in dict(layer.named_parameters()):
            continue
        owner = owners.setdefault(id(layer.weight), layer)
        if owner is not layer:
            if more := [one for one, _ in layer.named_parameters() if one != "weight"]:
                raise ValueError(f"{name} ties its weight but has {more[0]} of its own, which no reload can do")
            found.append((layer, owner))
    return found


def prepare(model: torch.nn.Module, tied: Tied) -> None:
    """On a CPU build, once after boot: keep no packed weight twice, and none for nothing."""
    heads = [layer for layer in model.modules() if isinstance(layer, ParallelLMHead)]
    for layer in model.modules():
        of_use = isinstance(layer, ParallelLMHead) or layer in [owner for _, owner in tied] or not heads
        if isinstance(layer, VocabParallelEmbedding) and not of_use and hasattr(layer, "cpu_linear"):
            layer.cpu_linear = torch.nn.functional.linear
            layer.quant_method.process_weights_after_loading = _nothing
    _share_packed(tied)


def reload(model: Any, model_config: Any, tensors: Iterable[tuple[str, torch.Tensor]], tied: Tied) -> None:
    """Replace all weights. What fails in here leaves a mixture."""
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        if isinstance(method, UnquantizedFusedMoEMethod) and _on_cpu(layer):
            method.moe_kernel = None
    initialize_layerwise_reload(model)
    model.load_weights(tensors)
    finalize_layerwise_reload(model, model_config)
    _share_packed(tied)


def _share_packed(tied: Tied) -> None:
    for head, owner in tied:
        if hasattr(owner, "cpu_linear"):
            head.cpu_linear = owner.cpu_linear


def _on_cpu(layer: torch.nn.Module) -> bool:
    return all(parameter.device.type == "cpu" for parameter in layer.parameters(recurse=False))


def _nothing(layer: torch.nn.Module) -> None:
    """Instead of packing `layer`."""
