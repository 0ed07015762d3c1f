"""Turns a step's trajectories into samples to learn from, and sums them up for its event. Pure functions."""

import hashlib
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from ebbtide.trainer.collectors import staleness
from ebbtide.trainer.learning.grpo import group_advantages, permute_within_groups
from ebbtide.trainer.learning.training_batches import TrainingSample
from ebbtide.types.rollout import Trajectory
from ebbtide.types.run import TrainerSpec
from ebbtide.types.tokens import unpack_ids, unpack_tokens


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
    rewards = np.array([trajectory.reward for trajectory in _episodes(trajectories).values()])
    lengths = [trajectory.loss_mask.count(1) for trajectory in trajectories]
    ages = [staleness(trajectory, step, steps) for trajectory in trajectories]
    values = {
        "trained": float(sum(trajectory.rollouts for trajectory in trajectories)),
        "tokens": float(sum(lengths)),
        "reward": float(rewards.mean()),
        "reward_std": float(rewards.std()),
        "response_length": float(np.mean(lengths)),
        "truncated_share": float(np.mean([trajectory.truncated for trajectory in trajectories])),
        "staleness_mean": float(np.average([mean for mean, _ in ages], weights=np.maximum(lengths, 1))),
        "staleness_max": float(max(largest for _, largest in ages)),
    }
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
