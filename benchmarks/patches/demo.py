"""The demo's own policy: its base model, then steps of GRPO by the trainer's own learner at the demo's settings.

    python -m benchmarks.patches.demo DIRECTORY [--threads N]

Rollouts are sampled here by transformers instead of by workers; all else, from the task to the optimiser, is the
demo's. The weights are kept in float32, as the demo publishes them.
"""

import argparse
import json
import time
import tomllib
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from benchmarks.patches.plans import RECORD, version_file
from benchmarks.patches.training import DEMO, ROOT, keep
from ebbtide.trainer.learning.torch_threads import limit_threads

#: Each of four updates, as the demo has four minibatches a step.
STEPS = 3


class Rollouts:
    """Groups of samples of the demo's prompts with their advantages; deterministic for one seed and network."""

    def __init__(self, spec: dict[str, Any], source: Any, tokenizer: Any) -> None:
        self._spec = spec
        self._source = source
        self._tokenizer = tokenizer

    def samples(self, learner: Any, step: int) -> tuple[list[Any], float]:
        """A step's samples, with the logprobs that the network gives them now, and their mean reward."""
        import torch

        from ebbtide.trainer.learning.grpo import group_advantages

        groups, size = self._spec["batch"]["groups_per_step"], self._spec["batch"]["group_size"]
        environments = [self._source.make("train", step * groups + group) for group in range(groups)]
        prompts = [self._prompt(environment) for environment in environments for _ in range(size)]
        responses = self._generate(learner.network, prompts)
        texts = self._tokenizer.batch_decode(responses, skip_special_tokens=True)
        rewards = torch.tensor([environments[row // size].step(text).reward for row, text in enumerate(texts)])
        advantages = group_advantages(rewards, torch.arange(groups).repeat_interleave(size)).tolist()
        rows = zip(prompts, responses, advantages, strict=True)
        found = [self._sample(learner, *row) for row in rows if row[2]]
        return found, float(rewards.mean())

    def _prompt(self, environment: Any) -> list[int]:
        text = self._tokenizer.apply_chat_template(
            [message.as_dict() for message in environment.reset()], tokenize=False, add_generation_prompt=True
        )
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids

    def _generate(self, network: Any, prompts: list[list[int]]) -> list[list[int]]:
        import torch

        padded = self._tokenizer.pad({"input_ids": prompts}, padding_side="left", return_tensors="pt")
        sampling = self._spec["sampling"]
        with torch.inference_mode():
            output = network.generate(
                **padded,
                do_sample=True,
                temperature=sampling["temperature"],
                top_p=sampling["top_p"],
                top_k=0,
                max_new_tokens=sampling["max_tokens"],
            )
        end = self._tokenizer.eos_token_id
        found = output[:, padded["input_ids"].shape[1] :].tolist()
        return [ids[: ids.index(end) + 1] if end in ids else ids for ids in found]

    def _sample(self, learner: Any, prompt: list[int], response: list[int], advantage: float) -> Any:
        import torch

        from ebbtide.trainer.learning.training_batches import TrainingSample, collate

        count = len(response)
        mask, versions = np.ones(count, np.bool_), np.full(count, learner.version, np.int64)
        ids = np.array([*prompt, *response], np.int64)
        bare = TrainingSample(ids, mask, np.zeros(count, np.float32), versions, advantage)
        with torch.no_grad():
            logprobs, _ = learner.logprobs(learner.network, collate([bare]))
        return TrainingSample(ids, mask, logprobs.numpy(), versions, advantage)


def make(directory: Path) -> None:
    """Take the steps; write each version, and last of all the record of how they came about."""
    import torch

    from ebbtide.environments import load_source
    from ebbtide.trainer.base_model.base_model import make_base_model
    from ebbtide.trainer.learning.learner import Learner, LearnerSettings
    from ebbtide.trainer.learning.network import load_network, load_tokenizer

    spec = tomllib.loads(DEMO.read_text())
    source: Any = load_source(spec["environment"]["name"], spec["environment"]["params"], spec["seed"])
    base = make_base_model(ROOT / ".cache" / "base-models", source, seed=spec["seed"])
    directory.mkdir(parents=True, exist_ok=True)
    began, trainer = time.monotonic(), spec["trainer"]
    torch.manual_seed(spec["seed"])
    # Without the warm-up, which would need ten steps more: these are to be at the demo's own rate.
    settings = LearnerSettings(learning_rate=trainer["learning_rate"], minibatches=trainer["minibatches"])
    learner = Learner(load_network(base), settings, version=0)
    rollouts = Rollouts(spec, source, load_tokenizer(base))
    record: dict[str, Any] = {"steps": STEPS, "rates": [], "rewards": [], "base": base.name}
    keep(learner.network, directory / version_file(0), masters=True)
    for step in range(1, STEPS + 1):
        learner.version = step - 1
        samples, reward = rollouts.samples(learner, step)
        stats = learner.step(samples, Random(step))
        keep(learner.network, directory / version_file(step), masters=True)
        record["rates"].append(stats.learning_rate)
        record["rewards"].append(reward)
        print(f"step {step}: reward {reward:.3f}, {len(samples)} samples", flush=True)
    record["seconds"] = round(time.monotonic() - began, 1)
    (directory / RECORD).write_text(json.dumps(record, indent=2))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    limit_threads(options.threads)
    make(options.directory)


if __name__ == "__main__":
    main()
