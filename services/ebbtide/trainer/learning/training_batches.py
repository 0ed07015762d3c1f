"""Turns a step's trajectories into samples to learn from, sums them up for its event, and makes micro-batches of them.

Pure functions. A micro-batch is one backward's, of padded tensors.
"""

import hashlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ebbtide.trainer.collectors import staleness
from ebbtide.trainer.learning.grpo import group_advantages, permute_within_groups
from ebbtide.trainer.learning.network import Network
from ebbtide.trainer.learning.sample_deal import micro_parts
from ebbtide.types.rollout import SampledResponse, Trajectory
from ebbtide.types.run import Sampling, TrainerSpec
from ebbtide.types.tokens import unpack_ids, unpack_tokens


@dataclass(frozen=True)
class TrainingSample:
    """One trajectory. Only at sampled tokens do logprobs and versions mean anything."""

    ids: npt.NDArray[np.int64]  # (t,): the prompt, then the m ids after it, over which the other arrays run
    mask: npt.NDArray[np.bool_]  # (m,): true where the policy sampled, false where an environment wrote
    logprobs: npt.NDArray[np.float32]
    versions: npt.NDArray[np.int64]
    advantage: float
    responses: tuple[SampledResponse, ...] = ()  # in the arrays; empty: all were sampled as the run says

    @property
    def length(self) -> int:
        return len(self.ids)

    @property
    def sampled(self) -> int:
        return int(self.mask.sum())

    @property
    def positions(self) -> npt.NDArray[np.int64]:
        """Each sampled token's position in its response, (sampled,), from 0. Without `responses`, an environment's
        tokens end one.
        """
        order = np.arange(len(self.mask))
        if self.responses:
            begun = np.zeros(len(self.mask), dtype=np.int64)
            for one in self.responses:
                begun[one.start : one.end] = one.start
        else:
            begun = np.maximum.accumulate(np.where(self.mask, -1, order)) + 1
        positions: npt.NDArray[np.int64] = (order - begun)[self.mask]
        return positions

    def sampled_by(self, known: dict[Sampling | None, int]) -> npt.NDArray[np.int64]:
        """The number in `known` of how each sampled token was sampled, (sampled,). Adds what is not known yet."""
        numbers = np.zeros(len(self.mask), dtype=np.int64)
        if not self.responses:
            numbers[:] = known.setdefault(None, len(known))
        for one in self.responses:
            numbers[one.start : one.end] = known.setdefault(_distribution(one.sampling), len(known))
        return numbers[self.mask]


@dataclass(frozen=True)
class TrainingBatch:
    """Samples padded on the right, or packed into one row, if it has `bounds`. Tensors of shape (n,) run over the
    sampled tokens, sample by sample.
    """

    ids: Tensor  # (b, t) int64
    rows: Tensor  # (n,) int64, as all below: the row of the position before each sampled token
    columns: Tensor  # and its column
    targets: Tensor
    positions: Tensor  # in their responses, from 0
    behaviour: Tensor
    versions: Tensor
    advantages: Tensor
    sampled_by: Tensor  # numbers of `samplings`
    samplings: tuple[Sampling | None, ...]  # at least one; None: as the run says
    first: int  # least of `columns`
    longest: int  # ids of the longest sample
    bounds: Tensor | None = None  # (samples + 1,) int32: where each sample begins in the row, and the last one ends
    places: Tensor | None = None  # (1, t) int64: each id's place in its sample

    def to(self, device: torch.device) -> "TrainingBatch":
        tensors: dict[str, Any] = {n: one.to(device) for n, one in vars(self).items() if isinstance(one, Tensor)}
        return replace(self, **tensors)

    def logits(self, network: torch.nn.Module) -> Tensor:
        """Returns the network's logits for each sampled token, (n, v), from the position before it.

        Rows need no attention mask: a causal network never sees padding on the right. Logits begin at the first
        position that is asked for, as those of a large vocabulary are the largest tensor of all.
        """
        inputs = self.ids[:, :-1]
        output = network(input_ids=inputs, use_cache=False, logits_to_keep=inputs.shape[1] - self.first)
        kept: Tensor = output.logits
        return kept[self.rows, self.columns - self.first]

    def hidden(self, network: Network) -> Tensor:
        """Returns the states that `network`'s head makes those logits of, (n, h)."""
        if self.bounds is None:
            output = network.base_model(input_ids=self.ids[:, :-1], use_cache=False)
        else:
            output = network.base_model(
                input_ids=self.ids,
                position_ids=self.places,
                use_cache=False,
                cu_seq_lens_q=self.bounds,
                cu_seq_lens_k=self.bounds,
                max_length_q=self.longest,
                max_length_k=self.longest,
            )
        states: Tensor = output.last_hidden_state
        return states[self.rows, self.columns]


def collate(samples: Sequence[TrainingSample], *, pad_id: int = 0) -> TrainingBatch:
    """Makes one batch of samples, each with at least one sampled token, padded on the right."""
    length = max(sample.length for sample in samples)
    ids = np.full((len(samples), length), pad_id, dtype=np.int64)
    mask = np.zeros((len(samples), length), dtype=np.bool_)
    for row, sample in enumerate(samples):
        end = len(sample.ids)
        ids[row, :end] = sample.ids
        mask[row, end - len(sample.mask) : end] = sample.mask
    return _batch(samples, ids, mask)


def pack(samples: Sequence[TrainingSample]) -> TrainingBatch:
    """Makes one batch of samples, each with at least one sampled token, behind one another in one row."""
    ids = np.concatenate([sample.ids for sample in samples]).astype(np.int64)
    sizes = [sample.length for sample in samples]
    prompts = [np.zeros(sample.length - len(sample.mask), dtype=np.bool_) for sample in samples]
    mask = np.concatenate([part for one, before in zip(samples, prompts, strict=True) for part in (before, one.mask)])
    return replace(
        _batch(samples, ids[None], mask[None]),
        bounds=torch.tensor([0, *np.cumsum(sizes)], dtype=torch.int32),
        places=torch.from_numpy(np.concatenate([np.arange(size) for size in sizes]))[None],
    )


def _batch(samples: Sequence[TrainingSample], ids: npt.NDArray[np.int64], mask: npt.NDArray[np.bool_]) -> TrainingBatch:
    """The batch of `ids` and of where they were sampled, both (b, t)."""
    known = dict[Sampling | None, int]()
    rows, columns = mask.nonzero()
    return TrainingBatch(
        ids=torch.from_numpy(ids),
        rows=torch.from_numpy(rows),
        columns=torch.from_numpy(columns - 1),
        targets=torch.from_numpy(ids[mask]),
        positions=torch.from_numpy(np.concatenate([s.positions for s in samples])),
        behaviour=torch.from_numpy(np.concatenate([s.logprobs[s.mask] for s in samples]).astype(np.float32)),
        versions=torch.from_numpy(np.concatenate([s.versions[s.mask] for s in samples]).astype(np.int64)),
        advantages=torch.from_numpy(np.repeat([s.advantage for s in samples], [s.sampled for s in samples])).float(),
        sampled_by=torch.from_numpy(np.concatenate([s.sampled_by(known) for s in samples])),
        samplings=tuple(known),
        first=int(columns.min()) - 1,
        longest=max(sample.length for sample in samples),
    )


def idle_sample() -> TrainingSample:
    """Makes the smallest sample, for a rank that has none left."""
    one, nothing = np.ones(1, dtype=np.bool_), np.zeros(2, dtype=np.int64)
    return TrainingSample(nothing, one, nothing[:1].astype(np.float32), nothing[:1], advantage=0.0)


def _distribution(sampling: Sampling) -> Sampling:
    """What of it changes logprobs, so that responses that differ in the rest are computed together."""
    held = ("min_tokens", "stop_token_ids", "ignore_eos") if sampling.min_tokens else ()
    return Sampling(**{name: getattr(sampling, name) for name in ("temperature", "top_p", "top_k", "min_p", *held)})


def micro_batches(samples: Sequence[TrainingSample], max_tokens: int) -> Iterator[TrainingBatch]:
    """Makes batches of at most `max_tokens` padded tokens (at least one sample), of like lengths."""
    return map(collate, micro_parts(samples, max_tokens))


def samples_of(trajectories: Sequence[Trajectory], spec: TrainerSpec, *, seed: int, step: int) -> list[TrainingSample]:
    """Makes samples with their group's advantages.

    Leaves out those that teach nothing: without sampled tokens, or with advantage 0 and no KL term. `seed`, `step` and
    the group determine the permutation of `permute_rewards`. So nothing depends on which other groups are given.
    """
    advantages = _advantages(trajectories, spec, seed=seed, step=step)
    samples = []
    for trajectory, advantage in zip(trajectories, advantages, strict=True):
        tokens = unpack_tokens(trajectory.tokens)
        sample = TrainingSample(
            ids=np.concatenate([unpack_ids(trajectory.prompt_ids), tokens["id"]]).astype(np.int64),
            mask=np.frombuffer(trajectory.loss_mask, dtype=np.uint8) == 1,
            logprobs=tokens["logprob"].astype(np.float32),
            versions=tokens["version"].astype(np.int64),
            advantage=advantage,
            responses=trajectory.responses,
        )
        if sample.sampled and (advantage or spec.kl_coefficient):
            samples.append(sample)
    return samples


def summary(trajectories: Sequence[Trajectory], steps: Mapping[int, int], *, step: int) -> dict[str, float]:
    """Averages a step's trajectories for its event; `accuracy` only if the environment counts right answers."""
    if not trajectories:
        return {"trained": 0.0, "tokens": 0.0}
    episodes = _episodes(trajectories).values()
    rewards = np.array([trajectory.reward for trajectory in episodes])
    by_group = defaultdict[str, set[float]](set)
    for trajectory in episodes:
        by_group[trajectory.group_id].add(trajectory.reward)
    lengths = [trajectory.loss_mask.count(1) for trajectory in trajectories]
    ages = [staleness(trajectory, step, steps) for trajectory in trajectories]
    values = {
        "trained": float(sum(trajectory.rollouts for trajectory in trajectories)),
        "tokens": float(sum(lengths)),
        "reward": float(rewards.mean()),
        "reward_std": float(rewards.std()),
        "equal_reward_share": sum(len(found) == 1 for found in by_group.values()) / len(by_group),
        "response_length": float(np.mean(lengths)),
        "response_length_min": float(min(lengths)),
        "response_length_max": float(max(lengths)),
        "truncated_share": float(np.mean([trajectory.truncated for trajectory in trajectories])),
        "staleness_mean": float(np.average([mean for mean, _ in ages], weights=np.maximum(lengths, 1))),
        "staleness_max": float(max(largest for _, largest in ages)),
    }
    ended = [length for length, trajectory in zip(lengths, trajectories, strict=True) if not trajectory.truncated]
    if ended:
        values["terminated_length"] = float(np.mean(ended))
    if asked := sum(trajectory.metrics.get("asked", 0.0) for trajectory in trajectories):
        values["accuracy"] = sum(trajectory.metrics.get("right", 0.0) for trajectory in trajectories) / asked
    return values


def _advantages(trajectories: Sequence[Trajectory], spec: TrainerSpec, *, seed: int, step: int) -> list[float]:
    """One of each trajectory. Branches of a session have the session's: they count once in their group's mean."""
    episodes = _episodes(trajectories)
    numbers = {group: number for number, group in enumerate(dict.fromkeys(one.group_id for one in episodes.values()))}
    rewards = torch.tensor([one.reward for one in episodes.values()], dtype=torch.float64)
    groups = torch.tensor([numbers[one.group_id] for one in episodes.values()], dtype=torch.int64)
    if spec.permute_rewards:
        rewards = permute_within_groups(rewards, groups, [_lots(seed, step, group) for group in numbers])
    advantages: list[float] = group_advantages(rewards, groups, normalize_std=spec.normalize_std).tolist()
    by_episode = dict(zip(episodes, advantages, strict=True))
    return [by_episode[_episode(trajectory)] for trajectory in trajectories]


def _lots(seed: int, step: int, group: str) -> torch.Generator:
    drawn = hashlib.blake2b(f"{seed}/{step}/{group}".encode(), digest_size=7).digest()
    return torch.Generator().manual_seed(int.from_bytes(drawn, "big"))


def _episodes(trajectories: Sequence[Trajectory]) -> dict[str, Trajectory]:
    """The first trajectory of each episode, in order: branches of a session have one reward."""
    first: dict[str, Trajectory] = {}
    for trajectory in trajectories:
        first.setdefault(_episode(trajectory), trajectory)
    return first


def _episode(trajectory: Trajectory) -> str:
    return trajectory.session_id or trajectory.episode_id
