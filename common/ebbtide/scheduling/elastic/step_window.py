"""Decides at each moment of a step whether the trainer's devices are lent, by plans that are made again as it goes on.

A plan for the next step is made before its rollouts are submitted: groups like those of the last step are expected.
Then the window is planned again after a share of what is left of it, and whenever the fleet changes. It is over once a
plan says so. All devices are lent and taken back together: ranks that share weights train together or not at all.

Invariant: `_expected` resembles the last step's groups, `_cut` is the present step's cut, and `_fleet` has the engines
elsewhere when the devices were lent last. Lost with the process; one step teaches it again.
"""

from collections.abc import Collection, Sequence
from itertools import cycle, islice
from math import inf
from statistics import fmean
from typing import Final

from msgspec import Struct

from ebbtide.scheduling.elastic.engine_pace import EnginePace
from ebbtide.scheduling.elastic.fading_quantiles import FadingQuantiles
from ebbtide.scheduling.elastic.group_lengths import GroupLeft
from ebbtide.scheduling.elastic.loan_view import LendableDevice, LoanPlan, LoanView
from ebbtide.scheduling.elastic.window_planner import WindowPlanner
from ebbtide.types.work_left import OpenGroup, WorkLeft

#: A window is decided again after this share of what is left of it, but neither sooner nor later than these bounds: the
#: nearer its end, the more it hangs on what is left.
_LOOK_SHARE: Final = 0.2
SOONEST_S: Final = 1.0
LATEST_S: Final = 10.0
#: Lending again is thought about so often, and only once an engine elsewhere was lost: as long as the fleet stays, the
#: window that just ended was the right one, and a better forecast is not worth another switch.
AGAIN_S: Final = 5.0
#: Rollouts that an engine runs at once, until one was seen that runs more, or is full.
_BATCH: Final = 64.0
#: Loads of full engines that are remembered, and the quantiles that are taken for the most rollouts and tokens. Some
#: engines that are seen full have just lost a rollout, and others hold rollouts that they have put off.
_LOADS: Final = 256
_FULL: Final = 0.9
_FULL_TOKENS: Final = 0.5
#: An engine prefills about so many tokens per second while it also decodes, until its own speed is known.
_READ_TOKENS_PER_S: Final = 20_000.0


class TrainerStep(Struct, frozen=True, kw_only=True):
    """A step as its trainer knows it. Lengths in tokens."""

    missing: int  # groups of the step that are not there
    complete: int = 0  # groups that are there
    ready_tokens: int = 0  # of these, prompts included, without those whose gradients were computed
    longest: int = 1 << 20  # a response at most
    local: Collection[str] = ()  # engines on the trainer's devices
    on_s: float = 0.0  # from the decision to lend until they generate
    off_s: float = 0.0  # from the decision to take them back until the trainer may use the devices
    any_version: bool = False  # older versions may generate its rollouts, too


class TrainedStep(Struct, frozen=True, kw_only=True):
    """A step that was trained."""

    prompts: Sequence[int]  # tokens of each group's prompt
    responses: Sequence[Sequence[int]]  # tokens of each group's responses
    learning_s: float  # for which the trainer computed
    generated_at: float  # when its last group was there

    @property
    def tokens(self) -> int:
        """Tokens that gradients were computed of, prompts included."""
        groups = zip(self.prompts, self.responses, strict=True)
        return sum(prompt * len(lengths) + sum(lengths) for prompt, lengths in groups)


class StepWindow:
    """`now` is in seconds of any one clock."""

    def __init__(self) -> None:
        self.planner = WindowPlanner()
        self.plan: LoanPlan | None = None  # the newest one
        self._batch, self._held = FadingQuantiles(memory=_LOADS), FadingQuantiles(memory=_LOADS)
        self._fits = _BATCH  # rollouts that an engine was seen to run while none waited in it
        self._expected: Sequence[GroupLeft] = ()
        self._cut: tuple[float, float, frozenset[str]] | None = None  # when, the forecast of generation then, the fleet
        self._fleet = frozenset[str]()
        self._asked = -inf

    def lends(self, left: WorkLeft, step: TrainerStep) -> bool:
        """Whether the devices are lent in a step that is about to be submitted. A short window would spread each group
        over all engines and then cut them all: without one, those that run first stay whole.
        """
        if not self._expected or not left.engines:
            return True
        self.plan = self.planner.plan(self._view(left, step))
        return self.plan.window_s > SOONEST_S

    def look_s(self, left: WorkLeft, step: TrainerStep) -> float:
        """While they are lent: seconds until the next decision; 0.0: they are taken back now."""
        view = self._view(left, step)
        if not step.local and view.remote > 0.0:  # nobody generates on them
            return 0.0
        self.plan = plan = self.planner.plan(view)
        if plan.window_s <= 0.5 * SOONEST_S:
            return 0.0
        return min(max(_LOOK_SHARE * plan.window_s, SOONEST_S), LATEST_S, plan.window_s)

    def spell_s(self, left: WorkLeft, step: TrainerStep) -> float:
        """How long the devices will probably stay lent to a trainer that waits for all groups; 0.0: unknown."""
        return self.planner.generation_s(self._view(left, step))

    def closed(self, now: float, left: WorkLeft, step: TrainerStep) -> None:
        """They were taken back, with groups missing or not."""
        self._fleet = elsewhere_of(left, step.local)
        if self.plan is not None:
            self._cut = now, self.plan.generated_s, self._fleet

    def lends_again(self, now: float, left: WorkLeft, step: TrainerStep) -> bool:
        """Whether the trainer, which has its devices and waits for groups, lends them once more in this step."""
        if now - self._asked < AGAIN_S or not step.local:
            return False
        self._asked = now
        self._learn_batch(left)  # engines elsewhere are full now, if ever
        elsewhere = elsewhere_of(left, step.local)
        if elsewhere and not (self._fleet - elsewhere and self.planner.lends_again(self._view(left, step))):
            return False
        self._fleet = elsewhere
        return True

    def surplus(self, left: WorkLeft, step: TrainerStep) -> str:
        """The spot engine that the step ends no later without, the one with the fewest rollouts; "": none is."""
        found = zip(left.engines, left.spot, left.rollouts, left.speeds, strict=True)
        spots = [(rollouts, speed, name) for name, spot, rollouts, speed in found if spot and name not in step.local]
        if len(spots) < 2:
            return ""
        _, speed, name = min(spots)
        return name if self.planner.surplus(self._view(left, step), speed) else ""

    def trained(self, step: TrainedStep, left: WorkLeft | None, local: Collection[str]) -> None:
        """Learn from a step. `left`: what was told last, None: nothing."""
        self.planner.trained(step.tokens, step.learning_s)
        self.planner.lengths.step_ended(step.responses)
        if self._cut is not None and left is not None:
            at, forecast_s, fleet = self._cut
            if fleet == elsewhere_of(left, local) and forecast_s < inf:
                self.planner.generated(forecast_s, step.generated_at - at)
        self._cut = None
        self._expected = [
            GroupLeft(prompt=prompt, waiting=[0] * len(lengths))
            for prompt, lengths in zip(step.prompts, step.responses, strict=True)
        ]

    def _view(self, left: WorkLeft, step: TrainerStep) -> LoanView:
        self._learn_batch(left)
        weight = max(1.0, left.open / len(left.groups)) if left.groups else 1.0
        coming = max(0, step.missing - left.open - left.ended)
        expected = islice(cycle(self._expected), round(coming / weight)) if self._expected else ()
        groups = [_group(one, step) for one in left.groups] + [_capped(one, step) for one in expected]
        return LoanView(
            groups=groups,
            weight=weight,
            ready_tokens=step.ready_tokens + left.ended * self._group_tokens(),
            complete=step.complete + left.ended,
            remote=_remote(left, step, coming=coming > 0),
            devices=_devices(left, step),
            batch=max(self._fits, self._batch.quantile(_FULL) if self._batch.known else 0.0),
            kv_tokens=self._held.quantile(_FULL_TOKENS) if self._held.known else inf,
            pace=_pace(left),
            read_s=1.0 / (left.prefill_tokens_per_s or _READ_TOKENS_PER_S),
        )

    def _group_tokens(self) -> int:
        """Tokens of a typical group, prompts included; 0 while nothing is known."""
        if not self._expected or not self.planner.lengths.known:
            return 0
        rests = self.planner.lengths.rests(self._expected[0], 0)
        return round(sum(rests) + fmean(one.prompt for one in self._expected) * len(rests))

    def _learn_batch(self, left: WorkLeft) -> None:
        """Engines in which rollouts wait run as many as they can. In the others so many as run do fit."""
        self._fits = max(self._fits, float(left.fits))
        for rollouts, tokens in zip(left.full_rollouts, left.full_tokens, strict=True):
            self._batch.observe(float(rollouts))
            self._held.observe(float(tokens))


def elsewhere_of(left: WorkLeft, local: Collection[str]) -> frozenset[str]:
    """The engines that are not the trainer's. One whose host lends nothing in the next minute is as good as lost."""
    found = zip(left.engines, left.shares, strict=True)
    return frozenset(name for name, share in found if share > 0.0).difference(local)


def _remote(left: WorkLeft, step: TrainerStep, *, coming: bool) -> float:
    """The speeds of the engines elsewhere that can generate the step. Those of a step that is `coming` have its version
    soon.
    """
    found = zip(left.engines, left.speeds, left.shares, left.versions, strict=True)
    return sum(
        speed * share
        for name, speed, share, version in found
        if name not in step.local and (coming or (version > 0 and (step.any_version or version == left.newest)))
    )


def _devices(left: WorkLeft, step: TrainerStep) -> list[LendableDevice]:
    """One for each engine of the trainer; one alone while none of them is attached."""
    found = [
        LendableDevice(name=name, speed=speed, on_s=step.on_s, off_s=step.off_s, busy=rollouts > 0)
        for name, speed, rollouts in zip(left.engines, left.speeds, left.rollouts, strict=True)
        if name in step.local
    ]
    return found or [LendableDevice(name="", on_s=step.on_s, off_s=step.off_s, busy=False)]


def _pace(left: WorkLeft) -> EnginePace:
    if not (left.step_s or left.rollout_s or left.context_s):
        return EnginePace()
    return EnginePace(step_s=left.step_s, rollout_s=left.rollout_s, context_s=left.context_s)


def _group(one: OpenGroup, step: TrainerStep) -> GroupLeft:
    return GroupLeft(
        prompt=one.prompt,
        finished=one.finished,
        running=one.running,
        lent=one.lent,
        waiting=one.waiting,
        cap=step.longest,
    )


def _capped(one: GroupLeft, step: TrainerStep) -> GroupLeft:
    return GroupLeft(prompt=one.prompt, waiting=one.waiting, cap=step.longest)
