"""Evaluates one pinned version on problems that are never trained on, apart from training's counts."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from ebbtide.driver.coordinator_traffic import AlreadyCompleted
from ebbtide.driver.episode_player import EpisodeEnding, EpisodePlan, EpisodePlayer
from ebbtide.scheduling.steps.step_pacing import VersionBounds
from ebbtide.types.rollout import Episode, RolloutKind
from ebbtide.types.run import RunEvent, RunSpec

#: `EvaluationSpec.priority` -> priority in an engine; lower goes first, and training's is its step. The default is
#: `before`, as the next step's training waits for the workers that an evaluation's version keeps.
_PRIORITY: Final[dict[str, Callable[[int], int]]] = {
    "before": lambda _step: -1,
    "beside": lambda step: step,
    "behind": lambda _step: 1 << 30,
}


@dataclass
class EvaluationScore:
    """Sums up the problems of one evaluation."""

    problems: int = 0
    failed: int = 0
    right: float = 0.0
    asked: float = 0.0
    reward: float = 0.0
    tokens: int = 0
    episodes: list[Episode] = field(default_factory=list)

    def add(self, ending: EpisodeEnding) -> None:
        self.episodes.append(Episode(episode_id=ending.plan.episode_id, rollout_ids=ending.rollout_ids))
        if (trajectory := ending.trajectory) is None:
            self.failed += 1
            return
        self.problems += 1
        # Without questions, the reward counts.
        self.asked += trajectory.metrics.get("asked", 1.0)
        self.right += trajectory.metrics.get("right", 0.0 if "asked" in trajectory.metrics else trajectory.reward)
        self.reward += trajectory.reward
        self.tokens += trajectory.loss_mask.count(1)

    def values(self) -> dict[str, float]:
        """`accuracy` is the share of answers right; `mean_length` counts sampled tokens per problem."""
        values = {"problems": float(self.problems), "answers": self.asked, "failed": float(self.failed)}
        if self.asked:
            values["accuracy"] = self.right / self.asked
        if self.problems:
            values["mean_reward"] = self.reward / self.problems
            values["mean_length"] = self.tokens / self.problems
        return values


async def evaluate(player: EpisodePlayer, *, step: int, bounds: VersionBounds) -> tuple[RunEvent, list[Episode]]:
    """Plays all problems against the version in `bounds`, that of `step`.

    Returns the event to report, and the episodes to complete afterwards: a driver that restarts in between finds the
    event and does not evaluate again.
    """
    async with asyncio.TaskGroup() as group:
        playing = [
            group.create_task(_play(player, _plan(player.spec, step, index, bounds)))
            for index in range(player.spec.evaluation.problems)
        ]
    score = EvaluationScore()
    for task in playing:
        if (ending := task.result()) is not None:
            score.add(ending)
    values = {"step": float(step), "version": float(bounds.maximum), **score.values()}
    message = f"accuracy {values['accuracy']:.3f}" if "accuracy" in values else "no problem could be asked"
    event = RunEvent(kind="evaluation", key=str(step), message=f"{message}, {score.problems} problems", values=values)
    return event, [episode for episode in score.episodes if episode.rollout_ids]


def _plan(spec: RunSpec, step: int, index: int, bounds: VersionBounds) -> EpisodePlan:
    return EpisodePlan(
        episode_id=f"e{step}.p{index}",
        group_id=f"e{step}",
        split="eval",
        index=index,
        step=step,
        kind=RolloutKind.EVAL,
        bounds=bounds,
        priority=_PRIORITY[spec.evaluation.priority](step),
    )


async def _play(player: EpisodePlayer, plan: EpisodePlan) -> EpisodeEnding | None:
    try:
        return await player.play(plan)
    except AlreadyCompleted:  # a former driver reported it
        return None
