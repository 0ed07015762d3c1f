"""Plays one episode: steps an environment through its turns, and has each response generated as a rollout."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import numpy as np

from ebbtide.driver.coordinator_traffic import CoordinatorTraffic
from ebbtide.driver.environments import EnvironmentFailed, Environments, EpisodeClock, EpisodeEnvironment
from ebbtide.driver.host_process import TookTooLong
from ebbtide.driver.scoring import OutOfTime
from ebbtide.environments import Split, StepResult
from ebbtide.errors import AlreadyExists, InvalidRequest
from ebbtide.run_client import Conversations, RunFailed
from ebbtide.step_pacing import VersionBounds
from ebbtide.telemetry import counter
from ebbtide.types.rollout import DropReason, FinishedRollout, FinishReason, RolloutKind, RolloutRequest, Trajectory
from ebbtide.types.run import RunSpec
from ebbtide.types.tokens import TOKEN, TokenArray, pack_ids, unpack_tokens

T = TypeVar("T")

#: The coordinator refused the prompt, such as one too long for every engine.
PROMPT_REFUSED: Final = "environment_prompt_refused"

_episodes = counter(
    "driver_episodes_total", "ended episodes; `kind`: train, eval; `outcome`: scored, failed", ("kind", "outcome")
)


@dataclass(frozen=True, kw_only=True)
class EpisodePlan:
    """Identifies an episode: problem `index` of `split`, generated for `step` within `bounds`."""

    episode_id: str
    group_id: str
    split: Split
    index: int
    step: int
    kind: RolloutKind
    bounds: VersionBounds
    priority: int = 0


@dataclass(frozen=True, kw_only=True)
class EpisodeEnding:
    """The end of an episode."""

    plan: EpisodePlan
    rollout_ids: tuple[str, ...] = ()  # that were submitted
    trajectory: Trajectory | None = None  # or the failure's reason and message
    failure: str = ""
    message: str = ""


class EpisodeFailed(Exception):
    """Carries the reason to record, and a message for people."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass
class _Tally:
    """Sums up an episode's reward and numbers over its turns."""

    reward: float = 0.0
    truncated: bool = True
    info: dict[str, float] = field(default_factory=dict)

    def add(self, result: StepResult) -> None:
        self.reward += result.reward or 0.0
        for name, value in result.info.items():
            self.info[name] = self.info.get(name, 0.0) + value


@dataclass
class _Transcript:
    """Holds an episode's prompt, and all tokens after it with their mask."""

    prompt: list[int]
    pieces: list[TokenArray] = field(default_factory=list)
    masks: list[bytes] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)

    def sampled(self, tokens: TokenArray) -> list[int]:
        ids: list[int] = tokens["id"].tolist()
        self._add(tokens, ids, b"\x01")
        return ids

    def written(self, ids: list[int]) -> None:
        tokens = np.zeros(len(ids), dtype=TOKEN)
        tokens["id"] = ids
        self._add(tokens, ids, b"\x00")

    def trajectory(self, plan: EpisodePlan, tally: _Tally, *, rollouts: int) -> Trajectory:
        return Trajectory(
            episode_id=plan.episode_id,
            group_id=plan.group_id,
            step=plan.step,
            group_size=1,  # set once its whole group has ended
            prompt_ids=pack_ids(self.prompt),
            tokens=b"".join(piece.tobytes() for piece in self.pieces),
            loss_mask=b"".join(self.masks),
            reward=tally.reward,
            truncated=tally.truncated,
            rollouts=rollouts,
            metrics=tally.info,
        )

    def _add(self, tokens: TokenArray, ids: list[int], mask: bytes) -> None:
        self.pieces.append(tokens)
        self.masks.append(mask * len(ids))
        self.ids += ids


class EpisodePlayer:
    """Plays the episodes of one run."""

    def __init__(
        self,
        spec: RunSpec,
        environments: Environments,
        conversations: Conversations,
        exchange: CoordinatorTraffic,
    ) -> None:
        self.spec = spec
        self._environments = environments
        self._conversations = conversations
        self._exchange = exchange

    def scorings(self) -> dict[str, float]:
        """See `Environments.scorings`."""
        return self._environments.scorings()

    async def play(self, plan: EpisodePlan) -> EpisodeEnding:
        """Plays the episode from reset to end. Failures become its ending; only `AlreadyCompleted` is raised."""
        rollouts: list[str] = []
        environment = self._environments.episode(plan.split, plan.index)
        try:
            trajectory = await self._turns(plan, environment, rollouts)
            ending = EpisodeEnding(plan=plan, trajectory=trajectory, rollout_ids=tuple(rollouts))
        except EpisodeFailed as failed:
            ending = EpisodeEnding(plan=plan, rollout_ids=tuple(rollouts), failure=failed.reason, message=str(failed))
        finally:
            environment.close()
        _episodes.labels(plan.kind.name.lower(), "failed" if ending.failure else "scored").inc()
        return ending

    async def _turns(self, plan: EpisodePlan, environment: EpisodeEnvironment, rollouts: list[str]) -> Trajectory:
        clock = EpisodeClock(self.spec.batch.episode_timeout_s)
        opening = await self._called(environment.reset(clock))
        transcript = _Transcript(self._templated(self._conversations.opening, opening))
        following: list[int] = []
        ending = _Tally()
        for turn in range(self.spec.batch.max_turns):
            transcript.written(following)
            finished = await self._generate(plan, turn, transcript, rollouts)
            response = transcript.sampled(unpack_tokens(finished.tokens))
            last = turn + 1 == self.spec.batch.max_turns
            result = await self._called(environment.step(clock, self._conversations.text(response), last=last))
            ending.add(result)
            if result.done:
                ending.truncated = finished.reason is FinishReason.LENGTH
                break
            following = self._templated(self._conversations.following, opening, response, result.messages)
            if 0 < self._conversations.context <= len(transcript.prompt) + len(transcript.ids) + len(following):
                break
        return transcript.trajectory(plan, ending, rollouts=len(rollouts))

    def _templated(self, template: Callable[..., list[int]], *messages: Sequence[Any]) -> list[int]:
        try:
            return template(*messages)
        except InvalidRequest as error:
            raise EpisodeFailed(PROMPT_REFUSED, str(error)) from error

    async def _called(self, call: Awaitable[T]) -> T:
        """Awaits a call of the environment's code."""
        try:
            return await call
        except RunFailed:
            raise
        except OutOfTime as error:
            raise EpisodeFailed(DropReason.REWARD_TIMEOUT, str(error)) from None
        except TookTooLong:
            limit = self.spec.batch.episode_timeout_s
            raise EpisodeFailed(DropReason.TIMEOUT, f"the environment took more than {limit:g} s") from None
        except EnvironmentFailed as error:
            raise EpisodeFailed(DropReason.ENVIRONMENT, str(error)) from error
        except Exception as error:
            raise EpisodeFailed(DropReason.ENVIRONMENT, f"{type(error).__name__}: {error}") from error

    async def _generate(
        self, plan: EpisodePlan, turn: int, transcript: _Transcript, rollouts: list[str]
    ) -> FinishedRollout:
        request = RolloutRequest(
            rollout_id=f"{plan.episode_id}.t{turn}",
            group_id=plan.group_id,
            episode_id=plan.episode_id,
            turn=turn,
            kind=plan.kind,
            prompt_ids=pack_ids(transcript.prompt + transcript.ids),
            sampling=self.spec.sampling,
            min_version=plan.bounds.minimum,
            max_version=plan.bounds.maximum,
            priority=plan.priority,
        )
        try:
            # An evaluation's step may be over for training: its rollouts have none.
            step = plan.step if plan.kind is RolloutKind.TRAIN else None
            finished = await self._exchange.generate(request, step=step)
        except InvalidRequest as error:
            raise EpisodeFailed(PROMPT_REFUSED, str(error)) from error
        except AlreadyExists as error:
            rollouts.append(request.rollout_id)  # a former driver submitted it with another body: drop it
            raise EpisodeFailed(DropReason.ENVIRONMENT, f"the environment is not deterministic: {error}") from error
        rollouts.append(request.rollout_id)
        if finished.reason is FinishReason.DEAD_LETTERED:
            raise EpisodeFailed(DropReason.DEAD_LETTERED, finished.message)
        if finished.reason is FinishReason.CANCELLED:
            raise EpisodeFailed(DropReason.CANCELLED, finished.message)
        return finished
