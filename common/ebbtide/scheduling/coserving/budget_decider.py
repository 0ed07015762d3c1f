"""What is asked of whoever decides how much rollout work may run beside a serving engine, and what is answered.

The governor answers it; so do the rivals that it is compared with.
"""

from typing import Final, Protocol

from msgspec import Struct

from ebbtide.types.grants import Budget, Forecast

#: Slack where nothing is inside.
NOTHING_INSIDE: Final = -1.0


class LatencyTargets(Struct, frozen=True, kw_only=True):
    """The SLO of one served model.

    `ttft_s`, `tpot_s`: seconds until the first token, and per token behind it, within which the `percentile` of
    requests is to be; where one is 0, `ttft_factor` or `tpot_factor` times that percentile of the engine's own unloaded
    latency, as learnt.

    `aim_ttft`: the part of the TTFT target to which rollouts may push a request; 0: none while one waits for its first
    token. `aim_tpot`: the part of the room between the unloaded engine's time per token and the TPOT target that
    rollouts may use; 0: none while a request decodes. TPOT is a request's mean, so that this is of the mean; no single
    pause is pushed beyond `aim_gap` times the target. `aim_slowed`: nor is the mean pushed beyond so many times the
    unloaded one, however much room the target leaves: who decodes for longer meets more of the prompts that come
    meanwhile, and those wait behind it.
    """

    ttft_s: float = 0.0
    tpot_s: float = 0.0
    ttft_factor: float = 1.6
    tpot_factor: float = 1.27
    percentile: float = 99.0
    aim_ttft: float = 0.0
    aim_tpot: float = 0.15
    aim_gap: float = 2.0
    aim_slowed: float = 1.25


class StepLimits(Struct, frozen=True, kw_only=True):
    """What the borrowing engine can take in a step: `tokens` and `sequences`, at most.

    `first_tokens`: of a step while nothing is known, and the least that is worth one. `step_share`: of the TTFT target,
    for one step at most. `quiet_s`: how long after the last request left nothing runs, at first; later between
    `quiet_least_s` and `quiet_most_s`. `hold_s`: how long an arrived request waits for the step under way, at most.
    """

    tokens: int = 256
    sequences: int = 64
    first_tokens: int = 16
    step_share: float = 0.1
    quiet_s: float = 0.01
    quiet_least_s: float = 0.002
    quiet_most_s: float = 0.05
    hold_s: float = 0.02


class BudgetDecision(Struct, frozen=True):
    """`budget` for the next step; `state`: idle, shared, quiet or reclaimed; `slack_s`: least of all requests inside,
    -1 where none is; `review_at`: decide again then, if no event asks for it before."""

    budget: Budget
    state: str
    slack_s: float
    review_at: float


class LearntCosts(Struct, frozen=True, kw_only=True):
    """What a governor knows by now, for status and grants. Seconds; 0: not known yet. `step_s`: of a rollout step, at
    most."""

    ttft_target_s: float = 0.0
    tpot_target_s: float = 0.0
    unloaded_ttft_s: float = 0.0
    unloaded_tpot_s: float = 0.0
    step_s: float = 0.0
    forecast: Forecast = Forecast()


class BudgetDecider(Protocol):
    """What a guard asks at each event of its traffic. `now` is in seconds of the monotonic clock and never goes
    back."""

    def arrived(self, now: float, request: str, prompt_tokens: int, *, streamed: bool = True) -> None:
        """A request came; `prompt_tokens` may be an estimate. One that is not `streamed` has its first token at its
        end, as seen from here, so it waits all the while and teaches nothing."""

    def produced(self, now: float, request: str, tokens: int) -> None:
        """It made `tokens` more; at first its first."""

    def ended(self, now: float, request: str, ok: bool) -> None:
        """It ended, was cancelled or failed. One that is not inside any more changes nothing."""

    def elsewhere(self, now: float, inside: int) -> None:  # noqa: ARG002 - not all ask
        """So many requests are inside that are not told here, as they are of models that others decide for: what runs
        meanwhile teaches nothing of the engine alone."""
        return

    def observed(self, now: float, inside: int, waiting: int) -> None:
        """In place of the three above where requests cannot be told apart: so many are inside, and so many of them have
        no first token."""

    def stepped(self, now: float, tokens: int, seconds: float) -> None:
        """A rollout step of `tokens` took so long; it ended at `now` or a little before."""

    def decide(self, now: float) -> BudgetDecision:
        """What the next rollout step may take, from now on and until told otherwise."""
        ...

    def hold_s(self, now: float, stepping_since: float | None) -> float:
        """For how long an arrived request is held back for the rollout step under way since then; 0: not at all."""
        ...

    def learnt(self, now: float) -> LearntCosts:
        """What is known by now."""
        ...

    def pays(self, now: float, wake_s: float) -> bool:
        """Whether what idle time may be expected is worth waking a sleeping engine, which takes `wake_s`."""
        ...
