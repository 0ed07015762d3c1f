"""GRPO by TRL, with rollouts of Ebbtide: the policy learns to write the letters from a to h.

Its argument is a plan as JSON. Each completion that a reward function sees becomes a line of `record`.
"""

import json
import random
import sys
from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from ebbtide.trl import EbbtideRollouts

PLAN = json.loads(sys.argv[1])
LETTERS = "abcdefgh"


def share_of_letters(text):
    return sum(one in LETTERS for one in text) / max(1, len(text))


class Recorder:
    """The rewards of the trainer: true ones, or those of other completions of the same generation."""

    __name__ = "letters"

    def __init__(self, shuffled: bool) -> None:
        self.shuffled = random.Random(PLAN["seed"]) if shuffled else None

    def __call__(self, completions, completion_ids, rollout_id, weight_version, trainer_state, **_):
        rewards = [share_of_letters(text) for text in completions]
        columns = {"rollout_id": rollout_id, "version": weight_version, "tokens": completion_ids, "reward": rewards}
        with Path(PLAN["record"]).open("a") as file:
            for values in zip(*columns.values(), strict=True):
                line = {"step": trainer_state.global_step, **dict(zip(columns, values, strict=True))}
                file.write(json.dumps(line) + "\n")
        if self.shuffled is not None:
            self.shuffled.shuffle(rewards)
        return rewards


def main() -> None:
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(PLAN["model"])
    arguments = GRPOConfig(
        output_dir=PLAN["output"],
        max_steps=PLAN["steps"],
        per_device_train_batch_size=PLAN["batch"],
        num_generations=PLAN["group"],
        max_completion_length=PLAN["length"],
        learning_rate=PLAN["learning_rate"],
        lr_scheduler_type="constant",
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        bf16=False,
        seed=PLAN["seed"],
        gradient_checkpointing=False,
        disable_tqdm=True,
    )
    with EbbtideRollouts(
        {"name": "letters"}, run_id=PLAN["run"], correct_mismatch=PLAN.get("correct", False)
    ) as rollouts:
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(PLAN["model"], dtype=torch.float32),
            processing_class=tokenizer,
            reward_funcs=Recorder(PLAN.get("control", False)),
            args=arguments,
            train_dataset=Dataset.from_dict({"prompt": list(LETTERS) * 64}),
            rollout_func=rollouts,
        )
        trainer.train()


main()
