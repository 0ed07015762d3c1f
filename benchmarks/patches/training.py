"""Real consecutive policies: a network that is trained, then takes steps as small as reinforcement's.

    python -m benchmarks.patches.training PLAN DIRECTORY [--threads N]

A Qwen3-architecture network with random weights is supervised on the demo's task (words to be spelled backward) at
`Plan.learning_rate`, then goes on at each of `Plan.rates`, a few steps to settle before those whose results are kept.
The master weights and AdamW (betas 0.9 and 0.99, no decay, its state kept throughout) are float32, the activations
bfloat16; what is kept of a version is its masters rounded to bfloat16, as a trainer publishes them. Nothing is
downloaded.
"""

import argparse
import json
import time
import tomllib
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.patches.plans import PLANS, RECORD, Plan, version_file
from ebbtide.trainer.learning.torch_threads import limit_threads

ROOT = Path(__file__).parents[2]
_SHAPE = ("layers", "hidden_size", "heads", "kv_heads", "head_dim", "feed_forward_size")
DEMO = ROOT / "services" / "ebbtide" / "demo" / "demo.toml"


class Supervision:
    """The network, its optimiser and its place in the data. Alive in one process; what outlives it is in files."""

    def __init__(self, plan: Plan) -> None:
        import torch

        from ebbtide.environments import load_source
        from ebbtide.trainer.base_model.base_model import new_network
        from ebbtide.trainer.base_model.base_model_plan import BaseModelPlan
        from ebbtide.trainer.base_model.character_tokenizer import character_tokenizer

        torch.manual_seed(0)
        environment = tomllib.loads(DEMO.read_text())["environment"]
        self._source: Any = load_source(environment["name"], environment["params"], 0)
        self._tokenizer = character_tokenizer()
        self._plan = plan
        shape = {name: getattr(plan, name) for name in _SHAPE}
        self.network: Any = new_network(BaseModelPlan(context=256, **shape), self._tokenizer)
        self._optimizer = torch.optim.AdamW(self.network.parameters(), betas=(0.9, 0.99), weight_decay=0.0)
        self._taken = 0

    def step(self, rate: float) -> float:
        """One optimiser step on new prompts; the loss before it, in nats a character."""
        import torch

        loss = self._loss()
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
        self._optimizer.step()
        found: float = loss.item()
        return found

    def _loss(self) -> Any:
        import torch

        from ebbtide.trainer.learning.training_batches import collate

        first = self._taken
        self._taken += self._plan.batch
        samples = [self._sample(first + row) for row in range(self._plan.batch)]
        batch = collate(samples, pad_id=self._tokenizer.pad_token_id)
        with torch.autocast("cpu", torch.bfloat16):
            logits = batch.logits(self.network)
        return torch.nn.functional.cross_entropy(logits.float(), batch.targets)

    def _sample(self, index: int) -> Any:
        from ebbtide.trainer.learning.training_batches import TrainingSample

        messages, answer = self._source.example("train", index)
        prompt = self._tokenizer.apply_chat_template(
            [message.as_dict() for message in messages], tokenize=False, add_generation_prompt=True
        )
        ids = [*self._tokenizer.encode(prompt + answer, add_special_tokens=False), self._tokenizer.eos_token_id]
        count = len(ids) - 1  # all but the first: these networks learn what words look like, too
        zeros = np.zeros(count, np.int64)
        return TrainingSample(np.array(ids), np.ones(count, np.bool_), zeros.astype(np.float32), zeros, 0.0)


def keep(network: Any, path: Path, *, masters: bool = False) -> None:
    """Write a version: all tensors as bfloat16, or as the float32 masters that they are."""
    import torch
    from safetensors.torch import save_file

    dtype = torch.float32 if masters else torch.bfloat16
    save_file({name: tensor.to(dtype).contiguous() for name, tensor in network.state_dict().items()}, path)


def make(plan: Plan, directory: Path) -> None:
    """Train, and write versions and, last of all, the record of how they came about."""
    directory.mkdir(parents=True, exist_ok=True)
    began, supervision = time.monotonic(), Supervision(plan)
    losses = []
    for step in range(1, plan.steps + 1):
        losses.append(supervision.step(plan.learning_rate * min(1.0, step / plan.warmup)))
        if step % 10 == 0:
            print(f"step {step} of {plan.steps}: loss {np.mean(losses[-10:]):.2f}", flush=True)
    kept: list[dict[str, Any]] = []
    for rate in plan.rates:
        losses += [supervision.step(rate) for _ in range(plan.settle)]
        for index in range(plan.pairs + 1):
            if index:
                losses.append(supervision.step(rate))
            masters = plan.masters == rate and index < 2
            kept.append({"rate": rate, "masters": masters})
            keep(supervision.network, directory / version_file(len(kept) - 1))
            if masters:
                keep(supervision.network, directory / version_file(len(kept) - 1, masters=True), masters=True)
        print(f"rate {rate:g}: loss {np.mean(losses[-plan.pairs :]):.2f}", flush=True)
    record = {
        "plan": asdict(plan),
        "parameters": sum(parameter.numel() for parameter in supervision.network.parameters()),
        "loss_of_random_weights": losses[0],
        "loss_after_training": float(np.mean(losses[plan.steps - 10 : plan.steps])),
        "loss_at_the_end": float(np.mean(losses[-10:])),
        "seconds": round(time.monotonic() - began, 1),
        "versions": kept,
    }
    (directory / RECORD).write_text(json.dumps(record, indent=2))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan", choices=PLANS)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    limit_threads(options.threads)
    make(PLANS[options.plan], options.directory)


if __name__ == "__main__":
    main()
