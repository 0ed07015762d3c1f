"""Checkpoints with random weights, for tests with real engines."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.real_kills.checkpoint import make_checkpoint as make

Maker = Callable[..., Path]

# Each engine would have one small function of its sampler compiled: that takes half of its boot.
os.environ["TORCHDYNAMO_DISABLE"] = "1"


@pytest.fixture(scope="session")
def make_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Maker:
    """Makes a Qwen3 of 0.4 M parameters over 128 tokens, the last one ending a text, as a checkpoint directory."""
    return lambda seed, **options: make(tmp_path_factory.mktemp("checkpoint"), seed, **options)
