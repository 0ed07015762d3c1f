"""What an engine computes with weights that the built-in trainer trained and published, as JSON on stdout: in a process
of its own, whose engines run within it.

Argument: a directory to write checkpoints to.
"""

import json
import os
import sys
from pathlib import Path
from random import Random

os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_OMP_THREADS_BIND="nobind", OMP_NUM_THREADS="1")
os.environ.update(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", VLLM_CONFIGURE_LOGGING="0")

import msgspec
import numpy as np
import torch
from safetensors.torch import save_file

from benchmarks.real_kills.checkpoint import make_checkpoint
from ebbtide.rollout_worker.engine.vllm import vllm_plugin
from ebbtide.trainer.base_model.base_model import character_tokenizer
from ebbtide.trainer.learning.local_learning import LocalLearning
from ebbtide.trainer.learning.training_batches import TrainingSample
from ebbtide.types.run import RunSpec
from tests.e2e.loader_facts import PROMPT, Facts, ask, boot, install, make_experts


def learning_of(model: Path) -> LocalLearning:
    trainer = {"learning_rate": 3e-3, "dtype": "float32"}
    body = {"name": "run", "model": str(model), "environment": {"name": "number_guessing"}, "trainer": trainer}
    return LocalLearning(msgspec.convert(body, RunSpec), source=model, device="cpu")


def samples() -> list[TrainingSample]:
    rng = np.random.default_rng(0)
    return [
        TrainingSample(
            ids=rng.integers(5, 100, 24),
            mask=np.ones(20, dtype=np.bool_),
            logprobs=np.full(20, -4.0, dtype=np.float32),
            versions=np.zeros(20, dtype=np.int64),
            advantage=Random(number).choice((1.0, -1.0)),
        )
        for number in range(8)
    ]


def logprobs(learning: LocalLearning, ids: list[int]) -> list[float]:
    """Of the ids behind the prompt, under the trainer's network."""
    whole = torch.tensor([[*PROMPT["prompt_token_ids"], *ids]])
    with torch.no_grad():
        table = learning._network(whole).logits[0, :-1].float().log_softmax(-1)
    found: list[float] = table.gather(1, whole[0, 1:, None])[-len(ids) :, 0].tolist()
    return found


def trained(model: Path) -> Facts:
    """An engine before and after the version that three steps made, and what the trainer finds of its tokens."""
    llm, learning = boot(model), learning_of(model)
    before = ask(llm)
    facts: Facts = {"before": before | {"trainer": logprobs(learning, before["ids"])}}
    for step in range(3):
        learning.train(samples(), step=step, version=0)
    version = dict(learning.tensors())
    path = model / "version.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in version.items()}, path)
    install(llm, path)
    path.unlink()
    after = ask(llm)
    facts["after"] = after | {"trainer": logprobs(learning, after["ids"])}
    facts["names"] = sorted(version)
    return facts


def main(directory: str) -> None:
    root = Path(directory)
    vllm_plugin.register()
    experts, tied = make_experts(root / "experts", 1), make_checkpoint(root / "tied", 1, tied=True)
    character_tokenizer().save_pretrained(experts)
    # Experts first: vLLM makes its groups of ranks for the first model, and others need fewer.
    print(json.dumps({"experts": trained(experts), "tied": trained(tied)}))  # noqa: T201 - the test reads it


if __name__ == "__main__":
    main(sys.argv[1])
