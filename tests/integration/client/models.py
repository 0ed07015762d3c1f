"""Small models, steps that change some of them, and the ways in which a trainer hands them over."""

from collections.abc import Callable
from typing import Any, TypeAlias

import pytest
import torch

from ebbtide.trainer.learning.gpu_changes import KeptTensors
from ebbtide.weights import named_tensor

Model: TypeAlias = dict[str, torch.Tensor]
Given: TypeAlias = Callable[[Model], Any]


def model(seed: int = 0) -> Model:
    generator = torch.Generator().manual_seed(seed)
    return {
        "layers.0.weight": torch.randn(700, 1000, generator=generator).to(torch.bfloat16),
        "layers.1.weight": torch.randn(900, 800, generator=generator).to(torch.bfloat16).T,
        "norm": torch.randn(64, generator=generator),
        "scalar": torch.tensor(3.0),
        "empty": torch.zeros(0, 4),
    }


def noise(seed: int) -> Model:
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(-(1 << 15), 1 << 15, (700, 1000), dtype=torch.int16, generator=generator)
    return {"w": bits.view(torch.bfloat16)}


def step(weights: Model, density: float = 0.03, seed: int = 1) -> Model:
    """The weights after an update that changes about so many of them."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.where(torch.rand(tensor.shape, generator=generator) < density, tensor * 1.01, tensor).to(
            tensor.dtype
        )
        for name, tensor in weights.items()
    }


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(named_tensor("w", tensor).data)


def same(found: Model, expected: Model) -> bool:
    return found.keys() == expected.keys() and all(
        (found[name].dtype, found[name].shape, bits(found[name])) == (tensor.dtype, tensor.shape, bits(tensor))
        for name, tensor in expected.items()
    )


def keeper(weights: Model) -> KeptTensors:
    """As a trainer hands them over that has its last version beside them."""
    return KeptTensors(weights.items, "cpu")


#: All of the tensors, or what changed in them where they lie.
GIVEN = pytest.mark.parametrize("given", [dict, keeper])
