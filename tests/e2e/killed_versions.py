"""Two policy versions of a network small enough to boot in seconds, and large enough that half of a patch is several
tiles; and what a fresh engine says with each."""

import asyncio
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from safetensors.numpy import load_file, save_file

from benchmarks.real_kills.checkpoint import make_checkpoint
from ebbtide.local_cluster.launcher import tethered
from ebbtide.types.tokens import TokenArray

#: Embeddings and output layer of 8 tiles each; everything else is less than one together.
VOCABULARY: Final = 16384
PROMPTS: Final = [[977 * number + 31 * place for place in range(1, 9)] for number in range(6)]
LENGTH: Final = 24
_ROOT: Final = Path(__file__).parents[2]
_WEIGHTS: Final = "model.safetensors"


class Said(NamedTuple):
    """Greedy continuations of `PROMPTS`: token ids and their logprobs."""

    ids: list[list[int]]
    logprobs: list[list[float]]

    @classmethod
    def of(cls, tokens: list[TokenArray]) -> "Said":
        return cls([one["id"].tolist() for one in tokens], [one["logprob"].tolist() for one in tokens])

    def gap(self, other: "Said") -> float:
        """The largest difference of two logprobs in the same place."""
        return float(np.abs(np.subtract(self.logprobs, other.logprobs)).max())


class Policy(NamedTuple):
    """Checkpoint directories: what engines boot from, version 1, and version 2, which is a small step behind it.

    `beside` is as small a step behind `base`: a patch to it is as large, and has not a byte in common.
    """

    base: Path
    first: Path
    second: Path
    beside: Path


def make_policy(folder: Path) -> Policy:
    base = make_checkpoint(folder / "base", 1, vocab_size=VOCABULARY)
    first = _moved(base, folder / "first", seed=2, share=1.0, by=0.02)
    second, beside = (
        _moved(source, folder / name, seed=3, share=0.25, by=0.03)
        for source, name in ((first, "second"), (base, "beside"))
    )
    return Policy(base, first, second, beside)


def _moved(source: Path, path: Path, *, seed: int, share: float, by: float) -> Path:
    """A checkpoint whose elements are those of `source`, but for a share of them that moved by about so much."""
    shutil.copytree(source, path)
    rng = np.random.default_rng(seed)
    tensors = load_file(source / _WEIGHTS)
    for tensor in tensors.values():
        moving = rng.random(tensor.shape, dtype=np.float32) < share
        tensor[moving] += by * rng.standard_normal(int(moving.sum()), dtype=np.float32)
    save_file(tensors, path / _WEIGHTS, metadata={"format": "pt"})
    return path


async def fresh(checkpoint: Path) -> Said:
    """What an engine says that has just booted from the checkpoint, in processes of its own."""
    process = await asyncio.create_subprocess_exec(
        *tethered(sys.executable, "-m", "tests.e2e.killed_reference", str(checkpoint), str(LENGTH)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(_ROOT)},
    )
    out, _ = await process.communicate(json.dumps(PROMPTS).encode())
    assert process.returncode == 0, f"no engine booted from {checkpoint}"
    found = json.loads(out.splitlines()[-1])
    return Said([one["ids"] for one in found], [one["logprobs"] for one in found])
