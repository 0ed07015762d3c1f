"""Defines the records of rollouts, episodes and trajectories."""

from enum import IntEnum
from typing import Annotated, Final

from msgspec import Meta, Struct

from ebbtide.types.run import Sampling

#: Submits under one lease that may be under way, or not durable, at a time.
MAX_UNSETTLED: Final = 1 << 15
#: Bytes of a request's `client_digest`.
MAX_CLIENT_DIGEST: Final = 32
#: Alternatives of each token of a scored prompt, at most: as many as vLLM gives unless it is set otherwise.
MAX_ALTERNATIVES: Final = 20
#: Lua counts exactly up to here.
MAX_NUMBER: Final = 1 << 53


class RolloutKind(IntEnum):
    TRAIN = 1
    EVAL = 2
    REQUEST = 3  # of a gateway's client


class FinishReason(IntEnum):
    STOP = 1
    LENGTH = 2
    CANCELLED = 3
    DEAD_LETTERED = 4


class SubmitOutcome(IntEnum):
    ACCEPTED = 1
    KNOWN = 2
    COMPLETED = 3


class DropReason:
    """Why a training rollout or a session was dropped. Environments may add reasons that begin with `environment_`."""

    ENVIRONMENT: Final = "environment_failure"
    TIMEOUT: Final = "episode_timeout"
    REWARD_TIMEOUT: Final = "reward_timeout"  # its scoring was cut, and the environment has no reward for that
    CANCELLED: Final = "cancelled"
    TOO_STALE: Final = "too_stale"
    DEAD_LETTERED: Final = "dead_lettered"
    GROUP_INCOMPLETE: Final = "group_incomplete"
    EQUAL_REWARDS: Final = "equal_rewards"  # of its group, for which another was drawn
    GROUP_FULL: Final = "group_full"  # a session more than its group has
    ABANDONED: Final = "abandoned"  # a session that nobody continued
    RUN_ENDED: Final = "run_ended"
    VERIFIER_FAILED: Final = "verifier_failed"  # it raised, ended its process, or gave no number
    VERIFIER_TIMEOUT: Final = "verifier_timeout"
    UNVERIFIED: Final = "unverified"  # no driver ran its verifier in time


class RolloutRequest(Struct, frozen=True, kw_only=True):
    """One requested completion."""

    rollout_id: str
    group_id: str
    episode_id: str
    prompt_ids: bytes  # packed u32
    sampling: Sampling
    kind: RolloutKind = RolloutKind.TRAIN
    turn: int = 0
    min_version: int = 0  # 0: no bound
    max_version: int = 0  # 0: no bound
    priority: int = 0
    interactive: bool = False  # somebody waits for each token
    client_digest: bytes = b""  # of what a gateway's client asked for; empty: no gateway asked
    #: Alternatives of which each token's score tells, 0: of none. None: the prompt is not scored.
    prompt_logprobs: Annotated[int, Meta(ge=0, le=MAX_ALTERNATIVES)] | None = None


class SubmitOrder(Struct, frozen=True, kw_only=True):
    """By what a submit is recognised as late, for as long as its run lives. Numbers are below `MAX_NUMBER`."""

    sequence: int = 0  # its number among the submits under its lease, from 1 on, and in each repeat; 0: none
    settled: int = 0  # no submit with a lower number comes for the first time, or is still waited for
    step: int | None = None  # that its rollouts are for; a caller that restarts asks for them again under the same ids
    first_step: int = 0  # no more rollouts of lower steps are submitted


class FinishedRollout(Struct, frozen=True, kw_only=True):
    rollout_id: str
    group_id: str
    episode_id: str
    reason: FinishReason
    tokens: bytes
    cursor: str = ""
    turn: int = 0
    kind: RolloutKind = RolloutKind.TRAIN
    attempts: int = 1
    message: str = ""


class TokenChunk(Struct, frozen=True, kw_only=True):
    offset: int
    tokens: bytes
    reason: FinishReason | None = None
    message: str = ""  # the evidence of a dead letter, or why a request was cancelled


class SampledResponse(Struct, frozen=True, kw_only=True):
    """The first tokens of one response, [start, end) of a trajectory's, and how they were sampled."""

    start: int
    end: int
    sampling: Sampling


class Trajectory(Struct, frozen=True, kw_only=True):
    """A finished episode."""

    episode_id: str
    group_id: str
    step: int
    group_size: int
    prompt_ids: bytes  # packed u32
    tokens: bytes  # packed records that follow the prompt
    loss_mask: bytes  # one byte per token
    reward: float
    cursor: str = ""
    truncated: bool = False
    rollouts: int = 1
    metrics: dict[str, float] = {}
    session_id: str = ""  # of a branch of a session; empty: of an episode that a driver played
    branches: int = 0  # trajectories of that session in all
    responses: tuple[SampledResponse, ...] = ()  # in order; empty: all were sampled as the run's spec says


class Episode(Struct, frozen=True, kw_only=True):
    episode_id: str
    rollout_ids: tuple[str, ...]
    drop_reason: str = ""
    trajectory: Trajectory | None = None


class TrajectoryOutcome(Struct, frozen=True, kw_only=True):
    cursor: str
    drop_reason: str = ""
