"""What the replay takes for given, and the policies that it compares."""

from typing import Final

import msgspec
from msgspec import Struct

from benchmarks.replay.fair_oracle import FairOraclePolicy
from benchmarks.replay.migrate_only import MigrateOnlyPolicy
from benchmarks.rivals.ablated_policy import AblatedPolicy
from benchmarks.rivals.rlboost.rlboost_policy import RLBoostPolicy
from ebbtide.simulator.world.ebbtide_policy import EbbtidePolicy
from ebbtide.simulator.world.simulation import Policy

#: The longest response: what a distribution says above it is cut off.
CAP_TOKENS: Final = 32_768
#: For those who may name another.
CAP_HELP: Final = (
    "the longest response in tokens, also after stretching (default: 32768). A cdf that ends below 1 says nothing of "
    "the rest: it is taken to lie between its last point and the cap, log-uniformly. For responses that were cut off "
    "at 16k (as those of response_length_math_cdf_upto4k.csv were) name 16384"
)


class Setting(Struct, frozen=True, kw_only=True):
    """The engine and the step, alike for all policies. Times in seconds, rates in tokens/s.

    A rollout makes `rate` until `plateau` of them run in an engine; beyond, all share what those make. With
    `context_tokens` > 0 contexts cost too: at a mean context of that many tokens a full plateau is half as fast.
    `spread`: workers are up to so much faster or slower. `boot_s` and `pull_s`: from the machine's start to its first
    token. What was flushed last, `flush_s` or `flush_tokens` ago at most, outlives a loss. `gap_s`: between steps.
    `cap_tokens`: the longest response, also after lengths were stretched.
    """

    rate: float = 30.0
    plateau: int = 32
    slots: int = 64
    context_tokens: float = 0.0
    spread: float = 0.0
    boot_s: float = 60.0
    pull_s: float = 15.0
    flush_s: float = 0.25
    flush_tokens: int = 32
    prefill_tokens_per_s: float = 10_000.0
    prompt_tokens: int = 512
    gap_s: float = 0.0
    rollouts: int = 1_024
    cap_tokens: int = CAP_TOKENS
    seed: int = 0


class Compared(Struct, frozen=True, kw_only=True):
    """A policy by the name that tables show."""

    name: str
    policy: Policy
    delays: bool = True  # else all rollouts are given to engines at once, and wait there
    foresees: bool = False  # it is told when each machine will be lost


def _without(name: str, **parts: bool) -> Compared:
    policy = msgspec.convert(parts, AblatedPolicy)
    return Compared(name=name, policy=policy, delays=policy.delays)


RESTART: Final = _without("restart", keeps=False, delays=False, balances=False)
MIGRATE: Final = Compared(name="migrate", policy=MigrateOnlyPolicy(), delays=False)
BALANCE: Final = Compared(name="balance", policy=EbbtidePolicy())
#: Knows lengths and losses, but pays what everybody pays.
FAIR: Final = Compared(name="fair oracle", policy=FairOraclePolicy(), foresees=True)
#: RLBoost as published. The paper has no limit on the rollouts that are sent between two looks at the engines.
ALGORITHM_2: Final = Compared(name="RLBoost, Algorithm 2", policy=RLBoostPolicy(sweep=65_536, adapts=False))
POLICIES: Final = (RESTART, MIGRATE, BALANCE, ALGORITHM_2, FAIR)
