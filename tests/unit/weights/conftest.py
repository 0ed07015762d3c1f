"""A small version: odd shapes, four dtypes, tiles of 16 bytes so that most tensors have several."""

import numpy as np
import pytest

from ebbtide.types.weights import Manifest, PolicyVersion
from ebbtide.weights import NamedTensor, build_manifest, named_tensor


@pytest.fixture
def tensors() -> list[NamedTensor]:
    rng = np.random.default_rng(7)
    return [
        named_tensor("embed.weight", rng.standard_normal((3, 5)).astype("f4")),
        named_tensor("scale", np.float32(2.5)),
        named_tensor("nothing", np.zeros((0, 4), "f2")),
        named_tensor("half", rng.standard_normal(9).astype("f2")),
        named_tensor("brain", rng.integers(0, 1 << 16, (7, 1, 3), dtype="u2"), dtype="BF16"),
        named_tensor("eight", rng.integers(0, 256, 17, dtype="u1"), dtype="F8_E4M3"),
    ]


@pytest.fixture
def manifest(tensors: list[NamedTensor]) -> Manifest:
    version = PolicyVersion(policy="policy", version=3, parent=2, step=40)
    return build_manifest("run-1", version, tensors, tile_bytes=16)
