"""Reloads all weights of a vLLM model from full checkpoint tensors, layer by layer, or drops their memory.

vLLM's layerwise reload does most of it, but does not know what CPU builds keep beside the parameters:

- An output layer that is tied to the embedding has no tensor of its own in a checkpoint, so the reload skips it and its
  packed copy would stay that of the old weights. It uses the embedding's packed copy, which the reload does renew.
- Expert layers are packed only when their kernel is first set up; a reload would copy unpacked weights over packed
  ones. Their kernels are set up again.
- Input embeddings are packed in vain where a separate output layer exists.

vLLM's sleep mode only warns on CPU builds. `drop` drops the parameters' pages (MADV_DONTNEED) and frees the packed
copies; a reload makes all of it again. Nothing may be computed in between.
"""

import ctypes
from collections.abc import Iterable
from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from ebbtide.rollout_worker.engine.vllm.kv_pages import drop_pages

Tied = list[tuple[VocabParallelEmbedding, VocabParallelEmbedding]]


def tied_layers(model: torch.nn.Module) -> Tied:
    """Output layers with the embedding whose weight they share.

    Raises `ValueError` for one with further parameters: a reload would believe that it was loaded, and copy unfilled
    memory over the shared weight.
    """
    found: Tied = []
    owners: dict[int, VocabParallelEmbedding] = {}
    for name, layer in model.named_modules():
        if not isinstance(layer, VocabParallelEmbedding) or "weight" not in dict(layer.named_parameters()):
            continue
        owner = owners.setdefault(id(layer.weight), layer)
        if owner is not layer:
            if more := [one for one, _ in layer.named_parameters() if one != "weight"]:
                raise ValueError(f"{name} ties its weight but has {more[0]} of its own, which no reload supports")
            found.append((layer, owner))
    return found


def prepare(model: torch.nn.Module, tied: Tied) -> None:
    """Free duplicate and useless packed weights, on a CPU build, once after boot."""
    heads = [layer for layer in model.modules() if isinstance(layer, ParallelLMHead)]
    for layer in model.modules():
        used = isinstance(layer, ParallelLMHead) or layer in [owner for _, owner in tied] or not heads
        if isinstance(layer, VocabParallelEmbedding) and not used and hasattr(layer, "cpu_linear"):
            layer.cpu_linear = torch.nn.functional.linear
            layer.quant_method.process_weights_after_loading = _nothing
    _share_packed(tied)


def reload(model: Any, model_config: Any, tensors: Iterable[tuple[str, torch.Tensor]], tied: Tied) -> None:
    """Replace all weights. A failure in here leaves a mixture."""
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        if isinstance(method, UnquantizedFusedMoEMethod) and _on_cpu(layer):
            method.moe_kernel = None
    initialize_layerwise_reload(model)
    model.load_weights(tensors)
    finalize_layerwise_reload(model, model_config)
    _share_packed(tied)


def drop(model: torch.nn.Module) -> None:
    """Give the memory of all weights of `model` back to the system. They read as zeros, or fail, until a reload."""
    for layer in model.modules():
        if hasattr(layer, "cpu_linear"):
            layer.__dict__["cpu_linear"] = _absent  # a plain attribute, whatever its type was
    for tensor in model.parameters():
        if tensor.device.type == "cpu" and tensor.is_contiguous():
            drop_pages(tensor.data_ptr(), tensor.nbytes)
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):  # the C library would keep the freed packed copies for the next reload
        libc.malloc_trim(0)


def _absent(*_: object) -> torch.Tensor:
    raise RuntimeError("the weights are away")


def _share_packed(tied: Tied) -> None:
    for head, owner in tied:
        if hasattr(owner, "cpu_linear"):
            head.cpu_linear = owner.cpu_linear


def _on_cpu(layer: torch.nn.Module) -> bool:
    return all(parameter.device.type == "cpu" for parameter in layer.parameters(recurse=False))


def _nothing(layer: torch.nn.Module) -> None:
    """Replaces the packing of `layer`."""
