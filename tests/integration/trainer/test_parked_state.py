"""A trainer of more than 200 MB gives its process's memory back to the system, and goes on bit for bit."""

import gc
import os
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from ebbtide.trainer.base_model.base_model import character_tokenizer
from ebbtide.trainer.learning.learner import Learner, LearnerSettings
from ebbtide.trainer.learning.network import load_network, save_network
from ebbtide.trainer.learning.parked_state import StatePark, return_free_memory
from ebbtide.trainer.learning.trainer_memory import CpuRoom, TrainerMemory
from tests.unit.trainer.learning.test_learner import sample

MIB = 1 << 20


def resident() -> int:
    """Bytes of this process's memory that are there."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture
def memory_folder() -> Iterator[Path]:
    with TemporaryDirectory(dir="/dev/shm") as made:
        yield Path(made)


@pytest.fixture
def learner(tmp_path: Path) -> Learner:
    """A learner after its first step, whose weights were loaded from a file: with two moments beside them."""
    tokenizer = character_tokenizer()
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=512, intermediate_size=1536, num_hidden_layers=6,
        num_attention_heads=8, num_key_value_heads=4, head_dim=64, pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id, bos_token_id=None,
    )  # fmt: skip
    save_network(Qwen3ForCausalLM(config), tokenizer, tmp_path / "model")
    learner = Learner(load_network(tmp_path / "model"), LearnerSettings(learning_rate=1e-3), version=3)
    learner.step([sample(12, 6)], Random(1))
    return learner


@pytest.mark.parametrize("place", ["warm", "cold"])
def test_a_state_of_200_mb_leaves_the_process_and_comes_back_bit_for_bit(
    place: str, learner: Learner, memory_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    park = StatePark(memory_folder, tmp_path / "cold", warm_bytes=(1 << 40) if place == "warm" else 0)
    memory = TrainerMemory(learner.movable, CpuRoom(), whole=learner.everything, park=park)
    before = [one.detach().clone() for one in learner.everything()]
    expected = [one.numpy().tobytes() for one in before]
    del before
    gc.collect()
    return_free_memory()
    held = resident()
    parked = memory.leave()
    freed = held - resident()
    began = time.monotonic()
    assert memory.restore() == parked.size
    took_s, bound_s = time.monotonic() - began, parked.size / 2e9 + 0.3
    with capsys.disabled():
        print(  # noqa: T201 - the figures are wanted, and depend on the machine
            f"\n{place}: {parked.size / 1e6:.0f} MB, freed {freed / parked.size:.1%}, back in {took_s:.3f} s "
            f"(bytes/(2 GB/s) + 0.3 s = {bound_s:.3f} s)"
        )
    assert parked.warm is (place == "warm")
    assert parked.size >= 200 * MIB
    assert freed >= 0.9 * parked.size
    assert [one.detach().numpy().tobytes() for one in learner.everything()] == expected
