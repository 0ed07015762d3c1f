"""Attention within each sample of a packed row: samples lie behind one another, and none sees another.

On GPUs it is FlashAttention's kernel for rows of several sequences, in torch (arXiv 2205.14135; no score of two samples
is computed at all). Elsewhere torch's attention runs on each sample alone, which is exact and slower.

The function is registered with `transformers`, whose networks hand it the samples' bounds. Without bounds it refuses,
since a network that drops them would let samples see each other.
"""

import functools
import inspect
import itertools
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from ebbtide.errors import InvalidRequest
from ebbtide.trainer.learning.network import Network

#: Name of this attention with `transformers`.
PACKED: Final = "packed_rows"
#: Kinds of layers in which a token sees others by attention alone.
_KINDS: Final = {"full_attention", "sliding_attention"}
#: Largest head, and multiple of sizes, of FlashAttention's kernel.
_LARGEST_HEAD, _HEAD_STEP = 256, 8


def packs(network: Network) -> bool:
    """Whether the network's samples can be packed, by what its class and configuration say.

    Layers that carry a state along the row would carry it into the next sample, and the kernel knows neither attention
    sinks nor capped scores.
    """
    config = network.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ("full_attention",))
    capped = getattr(config, "attn_logit_softcapping", None)
    sinks = any(name.endswith("sinks") for name, _ in network.named_parameters())
    by_interface = network._supports_attention_backend and not network._is_stateful  # noqa: SLF001
    return bool(by_interface and kinds <= _KINDS and not capped and not sinks)


@functools.cache
def has_kernel(device: str) -> bool:
    """Whether the kernel for packed rows runs on a device, in bfloat16."""
    if not device.startswith("cuda") or torch.cuda.get_device_capability(device) < (8, 0):
        return False
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return False
    return {"window_size", "enable_gqa", "scale"} <= inspect.signature(varlen_attn).parameters.keys()


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """Returns attention's output (1, t, heads, d) of `query` (1, heads, t, d), `key` and `value` (1, kv heads, t, d).

    `cu_seq_lens_q` (s + 1,) int32: where each sample begins, and the last one ends. `sliding_window`: the newest tokens
    that each token sees, itself included. Raises `InvalidRequest` for what it does not compute.
    """
    odd = [name for name in ("softcap", "s_aux") if more.get(name) is not None]
    if cu_seq_lens_q is None or max_length_q is None or attention_mask is not None or odd:
        raise InvalidRequest(f"{type(module).__name__} cannot be packed; set it to false", field="trainer.packing")
    kind = query.device.type
    if torch.is_autocast_enabled(kind):
        query, key, value = (one.to(torch.get_autocast_dtype(kind)) for one in (query, key, value))
    if query.dtype == torch.bfloat16 and has_kernel(str(query.device)) and _fits(query, value):
        from torch.nn.attention.varlen import varlen_attn

        q, k, v = (one[0].transpose(0, 1) for one in (query, key, value))
        window = (-1 if sliding_window is None else sliding_window - 1, 0)
        bounds, longest = cu_seq_lens_q, max_length_q
        found: Any = varlen_attn(
            q, k, v, bounds, bounds, longest, longest, scale=scaling, window_size=window, enable_gqa=True
        )
        return found[None], None
    ends = cu_seq_lens_q.tolist()
    parts = [
        _alone(query[:, :, begin:end], key[:, :, begin:end], value[:, :, begin:end], scaling, sliding_window)
        for begin, end in itertools.pairwise(ends)
    ]
    return torch.cat(parts, dim=2).transpose(1, 2), None


def _fits(query: Tensor, value: Tensor) -> bool:
    size = query.shape[-1]
    return size <= _LARGEST_HEAD and size % _HEAD_STEP == 0 and value.shape[-1] == size


def _alone(query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None) -> Tensor:
    """Causal attention of one sample."""
    length, mask = query.shape[2], None
    if window is not None and window < length:
        place = torch.arange(length, device=query.device)
        back = place[:, None] - place[None]
        mask = (back >= 0) & (back < window)
    return scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=True
    )


AttentionInterface.register(PACKED, packed_attention)
