"""A plain PyTorch GRPO loop, on one rank or on several with FSDP2, whose responses Ebbtide generates.

Lines marked `# ebbtide` are all that an engine in this process would not need. With a cluster whose workers serve the
model, such as that of `ebbtide up`, and its variables set (`source runs/up/env`):

    python examples/grpo_loop.py --model DIR
    torchrun --nproc-per-node 2 examples/grpo_loop.py --model DIR --run-id words-on-two-ranks

The task: five words of reasoning-gym, each to be spelled backward. The reward is the share that came out right.
"""

import argparse
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import reasoning_gym
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, AutoTokenizer

from ebbtide.client import SyncClient, SyncLease  # ebbtide
from ebbtide.client.publisher.torch_exchange import TorchExchange  # ebbtide
from ebbtide.types.run import RunEvent  # ebbtide
from ebbtide.types.tokens import unpack_tokens  # ebbtide

WORDS: Final = 5
CLIP: Final = 0.2
MINIBATCHES: Final = 4


class Batch(NamedTuple):
    """Padded rows, each a response behind its prompt. A row without a response counts nothing."""

    ids: Tensor  # (b, t) int64
    sampled: Tensor  # (b, t) bool
    logprobs: Tensor  # (b, t) float32: the worker's, where sampled
    advantages: Tensor  # (b,) float32


def questions(step: int, count: int, seed: int) -> list[tuple[str, list[str]]]:
    """Prompts of a step, and the words that are right."""
    size = count * WORDS
    options = {"min_word_len": 4, "max_word_len": 7, "size": size, "seed": seed * 1_000_003 + step}
    entries = list(reasoning_gym.create_dataset("spell_backward", **options))
    groups = [entries[at : at + WORDS] for at in range(0, size, WORDS)]
    return [(" ".join(one["metadata"]["word"] for one in group), [one["answer"] for one in group]) for group in groups]


def encode(tokenizer: Any, prompt: str) -> list[int]:
    """Token ids of a prompt, as the model's chat template has it."""
    if tokenizer.chat_template is None:
        return list(tokenizer.encode(prompt))
    message = {"role": "user", "content": prompt}
    text = tokenizer.apply_chat_template([message], add_generation_prompt=True, tokenize=False)
    return list(tokenizer.encode(text, add_special_tokens=False))


def reward(text: str, answers: Sequence[str]) -> float:
    return sum(word == answer for word, answer in zip(text.split(" "), answers, strict=False)) / len(answers)


def empty(count: int, length: int) -> Batch:
    shape = (count, length)
    ids, sampled = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.bool)
    return Batch(ids, sampled, torch.zeros(shape), torch.zeros(count))


def shared(batch: Batch | None, size: int) -> Batch:
    """Rank 0's batch, on all ranks."""
    shape = torch.tensor(batch.ids.shape if batch else (0, 0))
    if size > 1:
        dist.broadcast(shape, 0)
    batch = batch or empty(*shape.tolist())
    for tensor in batch if size > 1 else ():
        dist.broadcast(tensor, 0)
    return batch


def collate(prompts: list[list[int]], groups: list[list[Any]], rewards: list[list[float]], samples: int) -> Batch:
    """One row for each sample that was asked for, however many there are."""
    rows = [
        (prompt, response, score - sum(scores) / len(scores))
        for prompt, responses, scores in zip(prompts, groups, rewards, strict=True)
        for response, score in zip(responses, scores, strict=True)
    ]
    length = max(len(prompt) + len(response) for prompt, response, _ in rows)
    batch = empty(len(prompts) * samples, length)
    for row, (prompt, response, advantage) in enumerate(rows):
        end = len(prompt) + len(response)
        batch.ids[row, :end] = torch.tensor([*prompt, *response["id"].tolist()])
        batch.sampled[row, len(prompt) : end] = True
        batch.logprobs[row, len(prompt) : end] = torch.tensor(response["logprob"].tolist())
        batch.advantages[row] = advantage
    return batch


def train(model: Any, optimizer: torch.optim.Optimizer, batch: Batch, rank: int, size: int) -> None:
    """One pass over the batch in several updates, each rank with its share of the rows."""
    for part in zip(*(tensor.chunk(MINIBATCHES) for tensor in batch), strict=True):
        ids, sampled, behaviour, advantages = (tensor[rank::size].to(model.device) for tensor in part)
        count = max(1, int(part[1].sum()))
        logits = model(input_ids=ids[:, :-1]).logits.float()
        logprobs = logits.log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
        ratio = (logprobs - behaviour[:, 1:]).exp()
        weighted = torch.minimum(ratio * advantages[:, None], ratio.clamp(1 - CLIP, 1 + CLIP) * advantages[:, None])
        loss: Any = -weighted[sampled[:, 1:]].sum() * size / count  # FSDP2 averages gradients over ranks
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def load(name: str, size: int) -> Any:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32).to(device)
    if size > 1:
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
    return model


@contextmanager
def claimed(client: SyncClient, arguments: argparse.Namespace, rank: int) -> Iterator[SyncLease | None]:  # ebbtide
    """Submits the run and claims it, on rank 0; the others have no lease."""
    spec = {
        "name": "words",
        "model": arguments.model,
        "environment": {"name": "words"},  # a name for people: this loop makes its own prompts
        "sampling": {"max_tokens": 48},
        "trainer": {"name": "external"},  # the cluster's own trainer and driver leave the run alone
    }
    if rank:
        yield None
        return
    run = client.submit(spec, arguments.run_id)
    with client.claim(run.run_id) as lease:
        yield lease


def main(arguments: argparse.Namespace) -> None:
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if size > 1:
        dist.init_process_group("cuda:nccl,cpu:gloo" if torch.cuda.is_available() else "gloo")
    model, tokenizer = load(arguments.model, size), AutoTokenizer.from_pretrained(arguments.model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.learning_rate, weight_decay=0.0)
    warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: min(1.0, (done + 1) / 10))
    with SyncClient() as client, claimed(client, arguments, rank) as lease:  # ebbtide
        exchange: Any = TorchExchange() if size > 1 else None  # ebbtide
        publisher = lease.publisher(exchange) if lease else client.publisher(arguments.run_id, exchange)  # ebbtide
        version = publisher.publish(model.state_dict(), step=0).result()  # ebbtide
        for step in range(arguments.steps):
            batch = None
            if lease is not None:
                asked = questions(step, arguments.groups, arguments.seed)
                prompts = [encode(tokenizer, prompt) for prompt, _ in asked]
                rollouts = lease.generate(prompts, samples=arguments.samples, step=step, version=version)  # ebbtide
                groups = [[unpack_tokens(one.tokens) for one in group] for group in rollouts]  # ebbtide
                texts = [[tokenizer.decode(one["id"], skip_special_tokens=True) for one in group] for group in groups]
                rewards = [[reward(text, one[1]) for text in group] for group, one in zip(texts, asked, strict=True)]
                batch = collate(prompts, groups, rewards, arguments.samples)
                mean = sum(map(sum, rewards)) / sum(map(len, rewards))
            train(model, optimizer, shared(batch, size), rank, size)
            warmup.step()
            version = publisher.publish(model.state_dict(), step=step + 1, parent=version.version).result()  # ebbtide
            if lease is not None:
                lease.acknowledge(one.rollout_id for group in rollouts for one in group)  # ebbtide
                figures = {"step": float(step + 1), "reward": mean}  # ebbtide
                lease.report([RunEvent(kind="step", key=str(step), values=figures)])  # ebbtide
                print(f"step {step + 1}: reward {mean:.3f}, version {version.version}", flush=True)  # noqa: T201
        if lease is not None:
            ended = lease.finish()  # ebbtide
            counts = ended.counters
            print(f"{ended.run_id}: {counts['trained']} of {counts['submitted']} rollouts trained")  # noqa: T201
    if size > 1:
        dist.destroy_process_group()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train with GRPO in a plain PyTorch loop.")
    parser.add_argument("--model", required=True, help="Hugging Face checkpoint directory, the workers' own")
    parser.add_argument("--run-id", help="name of the run; several ranks need one")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--groups", type=int, default=32, help="prompts of each step")
    parser.add_argument("--samples", type=int, default=8, help="responses to each prompt")
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not arguments.run_id:
        parser.error("several ranks need --run-id: all of them name the run")
    return arguments


if __name__ == "__main__":
    main(parse())
