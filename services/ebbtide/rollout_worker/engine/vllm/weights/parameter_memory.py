"""Weights that go away and come back: the memory of a CPU engine's parameters.

vLLM's sleep mode is for GPUs: on a CPU build it only warns. Here pages of parameters are dropped (MADV_DONTNEED), and
what is kept beside them, packed for multiplications, is freed; a reload makes all of it again, as it does for each new
version. Nothing may be computed in between.
"""

import ctypes

import torch

from ebbtide.rollout_worker.engine.vllm.kv_pages import drop_pages


def drop(model: torch.nn.Module) -> None:
    """Give the memory of all weights of `model` back to the system. They read as zeros, or fail, until a reload."""
    for layer in model.modules():
        if hasattr(layer, "cpu_linear"):
            layer.__dict__["cpu_linear"] = _absent  # a plain attribute, whatever its type was
    for tensor in model.parameters():
        if tensor.device.type == "cpu" and tensor.is_contiguous():
            drop_pages(tensor.data_ptr(), tensor.nbytes)
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):  # what was packed was freed, and is kept for the next reload otherwise
        libc.malloc_trim(0)


def _absent(*_: object) -> torch.Tensor:
    raise RuntimeError("the weights are away")
