"""Decides at each moment of a step whether the trainer's devices are lent: until both sides of the step end together.

With W tokens to come, engines elsewhere that make n tokens/s, n + N with those on the trainer's devices, and t seconds
of training, generation and training end together if the devices generate for another

    T = (W - n t) / (n + N)

seconds. RLBoost (arXiv 2510.19225, section 4.3) follows T by the idle times of former steps; here it is computed from
what is left, again after a share of it and whenever the fleet changes. All devices are lent and taken back together:
ranks that share weights train together or not at all.

W is the number of responses that are out, each with what those of the last step that were longer than it still had to
come, in the mean. t is the last step's time for a token, for all tokens without gradients. Engines are as fast as they
were seen to be at the loads that they would have now. The tail, in which the load falls, is left out. Gradients are
computed of whole groups, so a device that returned before some are complete would be idle: it stays lent until then.

Invariant: what is learnt is the last step's, but for the load of full engines (`_most`), and `_fleet` has the engines
elsewhere when the devices were lent last. Lost with the process; one step teaches it again.
"""

from bisect import bisect_right
from collections.abc import Collection, Sequence
from itertools import accumulate
from math import inf
from statistics import fmean
from typing import Final, NamedTuple

from msgspec import Struct

from ebbtide.types.remaining_work import RemainingWork

#: A window is decided again after this share of what is left of it, but neither sooner nor later than these bounds: the
#: nearer its end, the more it hangs on what is left.
_LOOK_SHARE: Final = 0.2
SOONEST_S: Final = 1.0
LATEST_S: Final = 10.0
#: Lending again is thought about so often, and only once an engine elsewhere was lost: as long as the fleet stays, the
#: window that just ended was the right one.
AGAIN_S: Final = 5.0
#: Rollouts that an engine runs at once, until one was seen that runs more.
_BATCH: Final = 64.0
#: A trainer idles without groups: it has its devices back once so large a share of them is complete, but not sooner.
_FIRST: Final = 0.1
#: An engine is one too many if the step ends no sooner with it than by this share.
_HELPS: Final = 0.005


class TrainerStep(Struct, frozen=True, kw_only=True):
    """A step as its trainer knows it. Lengths in tokens."""

    missing: int  # groups of the step that are not there
    complete: int = 0  # groups that are there
    ready_tokens: int = 0  # of these, prompts included, without those whose gradients were computed
    local: Collection[str] = ()  # engines on the trainer's devices
    on_s: float = 0.0  # from the decision to lend until they generate
    off_s: float = 0.0  # from the decision to take them back until the trainer may use the devices
    any_version: bool = False  # older versions may generate its rollouts, too


class TrainedStep(Struct, frozen=True, kw_only=True):
    """A step that was trained."""

    responses: Sequence[Sequence[int]]  # tokens of each group's responses
    tokens: int  # that gradients were computed of, prompts included
    learning_s: float  # for which the trainer computed


class WindowPlan(NamedTuple):
    """In seconds from the decision; inf: unknown, or never."""

    window_s: float  # until the devices are taken back; inf: once the last response has ended
    end_s: float  # until the step is trained
    generated_s: float  # until the last response has ended, if the devices generate until then
    why: str  # for people


class StepWindow:
    def __init__(self) -> None:
        self.plan: WindowPlan | None = None  # the newest one
        self._lengths: Sequence[int] = ()  # of responses, rising
        self._sums: Sequence[int] = ()  # of the shortest one, two, ... of them
        self._group_size = self._group_tokens = self._first = self._token_s = (
            0.0  # tokens with prompts; `_token_s`: of training
        )
        self._most = _BATCH  # rollouts that an engine was seen to run
        self._fleet = frozenset[str]()
        self._asked = -inf

    def lends(self, left: RemainingWork, step: TrainerStep) -> bool:
        """Whether the devices are lent in a step that is about to be submitted. A short window would spread each group
        over all engines and then cut them all: without one, those that run first stay whole.
        """
        if not self._lengths or not left.engines:
            return True
        self.plan = self._planned(left, step)
        return self.plan.window_s > SOONEST_S

    def look_s(self, left: RemainingWork, step: TrainerStep) -> float:
        """While they are lent: seconds until the next decision; 0.0: they are taken back now."""
        self.plan = plan = self._planned(left, step)
        idle = not step.local and _remote(left, step, coming=False) > 0.0  # nobody generates on them
        if idle or plan.window_s <= 0.5 * SOONEST_S:
            return 0.0
        return min(max(_LOOK_SHARE * plan.window_s, SOONEST_S), LATEST_S, plan.window_s)

    def spell_s(self, left: RemainingWork, step: TrainerStep) -> float:
        """How long the devices will probably stay lent to a trainer that waits for all groups; 0.0: unknown."""
        generated_s = self._planned(left, step).generated_s
        return generated_s if generated_s < inf else 0.0

    def closed(self, left: RemainingWork, step: TrainerStep) -> None:
        """They were taken back, with groups missing or not."""
        self._fleet = _elsewhere(left, step.local)

    def lends_again(self, now: float, left: RemainingWork, step: TrainerStep) -> bool:
        """Whether the trainer, which has its devices and waits for groups, lends them once more in this step."""
        if now - self._asked < AGAIN_S or not step.local:
            return False
        self._asked = now
        elsewhere = _elsewhere(left, step.local)
        if elsewhere:
            worth_s = step.on_s + step.off_s + SOONEST_S
            if not (self._fleet - elsewhere and self._lengths and self._planned(left, step).window_s > worth_s):
                return False
        self._fleet = elsewhere
        return True

    def surplus(self, left: RemainingWork, step: TrainerStep) -> str:
        """The spot engine that the step ends no later without, the one with the fewest rollouts; "": none is."""
        found = zip(left.engines, left.spot, left.rollouts, left.speeds, strict=True)
        spots = [(rollouts, speed, name) for name, spot, rollouts, speed in found if spot and name not in step.local]
        if len(spots) < 2 or not self._lengths:
            return ""
        _, speed, name = min(spots)
        if speed >= _remote(left, step, coming=step.missing > left.open + left.ended):
            return ""  # without it nobody elsewhere generates the step
        without_s = self._planned(left, step, less=speed).end_s
        return name if without_s <= (1.0 + _HELPS) * self._planned(left, step).end_s else ""

    def trained(self, step: TrainedStep) -> None:
        """Learn from a step."""
        lengths = sorted(length for group in step.responses for length in group)
        if lengths and step.tokens > 0 and step.learning_s > 0.0:
            self._lengths, self._sums = lengths, list(accumulate(lengths))
            self._group_size = len(lengths) / len(step.responses)
            self._group_tokens = step.tokens / len(step.responses)
            longest = sorted(max(group) for group in step.responses if group)
            self._first = float(longest[int(_FIRST * len(longest))])
            self._token_s = step.learning_s / step.tokens

    def _planned(self, left: RemainingWork, step: TrainerStep, *, less: float = 0.0) -> WindowPlan:
        """`less`: without engines elsewhere of such a speed. Groups that are not submitted yet are taken for typical
        ones.
        """
        coming = max(0, step.missing - left.open - left.ended)
        remote = _remote(left, step, coming=coming > 0) - less
        # One alone while no engine on the devices is attached.
        local = sum(one for name, one in zip(left.engines, left.speeds, strict=True) if name in step.local) or 1.0
        if not self._lengths:
            return _untaught(remote, local, left, step)
        weight = left.open / len(left.groups) if left.groups else 0.0  # so many groups does each one stand for
        made = [one for group in left.groups for one in (*group.running, *group.waiting)]
        running = weight * sum(len(group.running) for group in left.groups)
        self._most = max(self._most, running / (remote + local))
        out = max(1.0, weight * len(made) + coming * self._group_size)
        tokens = weight * sum(map(self._rest, made)) + coming * self._group_size * self._rest(0)
        prompt = fmean(group.prompt for group in left.groups) if left.groups else 0.0
        context = prompt + (weight * sum(made) + 0.5 * tokens) / out
        alone = self._tokens_per_s(left, remote, out, context)
        together = self._tokens_per_s(left, remote + local, out, context)
        untrained = step.ready_tokens + (left.open + left.ended + coming) * self._group_tokens
        training_s = step.off_s + untrained * self._token_s
        generated_s = tokens / together
        if alone <= 0.0:
            return WindowPlan(inf, generated_s + training_s, generated_s, "no engine elsewhere generates the step")
        alone_s = tokens / alone
        window_s = max(0.0, tokens - alone * training_s) / together
        complete = step.complete + left.ended
        if complete < _FIRST * (complete + left.open + coming):
            token_s = min(out, self._most * (remote + local)) / together
            window_s = max(window_s, SOONEST_S, (self._first - max(made, default=0)) * token_s)
        end_s = window_s + max(training_s, (tokens - window_s * together) / alone)
        why = f"others would generate for {alone_s:.1f} s, and training takes {training_s:.1f} s"
        return WindowPlan(window_s, end_s, generated_s, why)

    def _rest(self, made: int) -> float:
        """Tokens to come of a response that has `made` so many, if it is like the longer ones of the last step. One
        that is longer than all is taken to grow by half of the longest.
        """
        shorter = bisect_right(self._lengths, made)
        longer = len(self._lengths) - shorter
        if not longer:
            return 0.5 * self._lengths[-1]
        return (self._sums[-1] - (self._sums[shorter - 1] if shorter else 0)) / longer - made

    def _tokens_per_s(self, left: RemainingWork, engines: float, out: float, context: float) -> float:
        """Of typical engines that share the responses that are out."""
        used = min(engines, out)
        if used <= 0.0:
            return 0.0
        load = max(1.0, min(out / used, self._most))
        return used * load / left.pace().seconds(load, context)


def _untaught(remote: float, local: float, left: RemainingWork, step: TrainerStep) -> WindowPlan:
    share = max(_FIRST, 1.0 - remote / local)
    complete = step.complete + left.ended
    over = remote > 0.0 and complete >= share * (complete + left.open)
    return WindowPlan(0.0 if over else inf, inf, inf, "no step has ended yet")


def _elsewhere(left: RemainingWork, local: Collection[str]) -> frozenset[str]:
    """The engines that are not the trainer's. One whose host lends nothing in the next minute is as good as lost."""
    found = zip(left.engines, left.shares, strict=True)
    return frozenset(name for name, share in found if share > 0.0).difference(local)


def _remote(left: RemainingWork, step: TrainerStep, *, coming: bool) -> float:
    """The speeds of the engines elsewhere that can generate the step. Those of a step that is `coming` have its version
    soon.
    """
    found = zip(left.engines, left.speeds, left.shares, left.versions, strict=True)
    return sum(
        speed * share
        for name, speed, share, version in found
        if name not in step.local and (coming or (version > 0 and (step.any_version or version == left.newest)))
    )
