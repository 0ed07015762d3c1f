"""Repairs how CPU builds of vLLM 0.32 verify drafts of sampled tokens.

There, temperatures and limits of requests are spread over their draft tokens by a kernel that writes into a copy of the
result: what is read is memory as it was. Greedy requests read none of it.
"""

from typing import Any

import torch


def spread(
    values: torch.Tensor, sums: torch.Tensor, count: int, replace_from: float = 0, replace_to: float = 0
) -> torch.Tensor:
    """Each request's value (N) for each of its draft tokens (`count`): `sums` (N) counts tokens up to and with its own.
    `replace_from` becomes `replace_to`."""
    counts = torch.diff(sums, prepend=sums.new_zeros(1)).to(torch.int64)
    found = values.repeat_interleave(counts, output_size=count)
    return torch.where(found == replace_from, torch.full_like(found, replace_to), found)


def repair() -> None:
    """Have this process's sampler spread values by `spread`."""
    from vllm.v1.sample import rejection_sampler

    sampler: Any = rejection_sampler
    sampler.expand_batch_to_tokens = spread
