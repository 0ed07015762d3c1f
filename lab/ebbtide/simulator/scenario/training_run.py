"""Defines the runs of a scenario: their steps, prompts, responses, environments and trainers."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from ebbtide.simulator.scenario.quantity_spec import (
    MATH_RESPONSES,
    Dollars,
    Gbps,
    LengthSpec,
    Name,
    QuantitySpec,
    Seconds,
    Tokens,
    TrainerReference,
)
from ebbtide.types.run import ShareSpec


class SimulatedEnvironment(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an episode meets beside the model. One turn without waits is the plain case."""

    turns: QuantitySpec = QuantitySpec(value=1)  # of an episode, rounded, at least one
    adds_tokens: QuantitySpec = QuantitySpec(value=256)  # to the context between two turns
    wait_s: QuantitySpec = QuantitySpec(value=0)  # between the end of a turn's response and the next turn
    reward_s: QuantitySpec = QuantitySpec(value=0)  # that scoring the last response takes


class SimulatedRewards(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How responses are scored. `environment.reward_s` is what that takes."""

    scorers: Annotated[int, Meta(ge=0, le=100_000)] = 0  # processes that score; 0: there is always one
    when: Literal["beside", "after"] = "beside"  # a response has ended, or all of its step have
    timeout_s: Annotated[float, Meta(gt=0)] | None = None  # as `reward_timeout_s` of a run's `[tail]`


class TrainingRun(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One training job: a `[[run]]` of the scenario."""

    name: Name
    start_s: Seconds = 0.0
    steps: Annotated[int, Meta(ge=1, le=1_000_000)] | None = None  # none: those of the scenario, or until its end
    prompts: Annotated[int, Meta(ge=1, le=100_000)] = 128  # of a step
    group: Annotated[int, Meta(ge=1, le=4096)] = 8  # samples of each
    max_staleness: Annotated[int, Meta(ge=0, le=1000)] = 0  # steps that generation may run ahead of training
    dataset: Annotated[int, Meta(ge=0, le=1_000_000_000)] = 0  # prompts before the first comes again; 0: none does

    prompt_tokens: QuantitySpec = QuantitySpec(value=512)
    cap: Tokens = 16_384  # the longest response of a turn
    context: Tokens = 131_072  # an episode's most tokens, prompts included
    lengths: LengthSpec = MATH_RESPONSES
    environment: SimulatedEnvironment = SimulatedEnvironment()
    rewards: SimulatedRewards = SimulatedRewards()

    trainer: TrainerReference
    trainer_price_per_hour: Dollars = 0.0
    publish_gbps: Gbps = 200.0  # the link on which its versions leave
    checkpoint_every: Annotated[int, Meta(ge=0, le=1_000_000)] = 10  # steps; 0: never
    share: ShareSpec = ShareSpec()  # of the fleet, as in a run's spec
    order: Literal["lengths", "submitted"] = "submitted"  # as in a run's `[tail]`

    @property
    def rollouts_per_step(self) -> int:
        return self.prompts * self.group
