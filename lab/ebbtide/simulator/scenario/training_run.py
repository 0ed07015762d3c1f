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
    """The environment of episodes. One turn without waits is the default. All are quantities."""

    turns: QuantitySpec = QuantitySpec(value=1)  # turns of an episode, rounded, at least one
    adds_tokens: QuantitySpec = QuantitySpec(value=256)  # what the environment adds to the context between two turns
    wait_s: QuantitySpec = QuantitySpec(value=0)  # from the end of a turn's response to the next turn
    reward_s: QuantitySpec = QuantitySpec(value=0)  # reward computation after the last response


class SimulatedRewards(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How rewards are computed. `environment.reward_s` is the time that each takes."""

    scorers: Annotated[int, Meta(ge=0, le=100_000)] = 0  # processes that compute rewards; 0: one for each response
    #: `"immediately"`: as soon as a response has ended. `"after"`: once all of the step have.
    when: Literal["immediately", "after"] = "immediately"
    timeout_s: Annotated[float, Meta(gt=0)] | None = None  # as `reward_timeout_s` of a run's `[tail]`


class TrainingRun(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A training job. A turn's prompt is the whole context: the first prompt, all earlier responses, and what the
    environment added.
    """

    name: Name  # part of its rollouts' names
    start_s: Seconds = 0.0  # of the scenario, at which the run is submitted
    steps: Annotated[int, Meta(ge=1, le=1_000_000)] | None = None  # none: those of the scenario, or until its end
    prompts: Annotated[int, Meta(ge=1, le=100_000)] = 128  # of a step
    group: Annotated[int, Meta(ge=1, le=4096)] = 8  # samples of each prompt
    max_staleness: Annotated[int, Meta(ge=0, le=1000)] = 0  # steps that generation may run ahead of training
    dataset: Annotated[int, Meta(ge=0, le=1_000_000_000)] = (
        0  # prompts before the first repeats, in another order; 0: none does
    )

    prompt_tokens: QuantitySpec = QuantitySpec(value=512)  # of a first prompt, a quantity
    cap: Tokens = 16_384  # longest response of a turn, in tokens
    context: Tokens = 131_072  # longest episode, prompts included, in tokens
    lengths: LengthSpec = MATH_RESPONSES  # of responses, in tokens: a quantity, and how lengths correlate
    environment: SimulatedEnvironment = SimulatedEnvironment()  # a table of its own keys
    rewards: SimulatedRewards = SimulatedRewards()  # a table of its own keys

    trainer: TrainerReference  # how fast it is: see engines and trainers
    trainer_price_per_hour: Dollars = 0.0  # dollars
    publish_gbps: Gbps = 200.0  # link on which its versions leave
    checkpoint_every: Annotated[int, Meta(ge=0, le=1_000_000)] = 10  # steps; 0: never
    share: ShareSpec = ShareSpec()  # of the fleet: the keys of `[share]` in a run's spec
    order: Literal["lengths", "submitted"] = "submitted"  # as in a run's `[tail]`

    @property
    def rollouts_per_step(self) -> int:
        return self.prompts * self.group
