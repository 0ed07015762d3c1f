"""Decides at each moment of a step whether the trainer's devices are lent: for the time after which both sides of the
step end together.

With W tokens to come, engines elsewhere that make n tokens/s, n + N with those on the trainer's devices, and t seconds
of training, generation and training end together if the devices generate for

    T = (W - n t) / (n + N)

which is the idle time that RLBoost (arXiv 2510.19225, section 4.3) follows from step to step. T is computed again after
a share of it, and whenever the fleet changes, so it follows what really happens. All devices are lent and taken back
together: ranks that share weights train together or not at all.

W is the number of responses that are out, each with the mean of what those of the last step that were longer than it
still had to come. t follows from the last step's time for a token. n and N are taken at the loads that the engines
would have: with few responses left, twice the engines are less than twice as fast.

Invariant: `_lengths`, `_group_tokens`, `_group_size` and `_token_s` are the last step's, and `_fleet` has the engines
elsewhere when the devices were lent last. Lost with the process; one step teaches it again.
"""

from bisect import bisect_right
from collections.abc import Collection, Sequence
from itertools import accumulate
from math import inf
from statistics import fmean
from typing import Final, NamedTuple

from ebbtide.scheduling.elastic.engine_pace import EnginePace
from ebbtide.scheduling.elastic.step_window import AGAIN_S, LATEST_S, SOONEST_S, TrainedStep, TrainerStep, elsewhere_of
from ebbtide.types.work_left import WorkLeft

#: T is computed again after this share of it: the nearer its end, the more it hangs on what is left.
_LOOK_SHARE: Final = 0.2
#: Rollouts that an engine runs at once, until one was seen that runs more.
_BATCH: Final = 64.0
#: Until a step has ended, training is taken to last as long as generation on the trainer's own engines would. Then a
#: share of 1 - n / N is left to the window. The first gradients need some groups, so at least this share.
_UNTAUGHT: Final = 0.1
#: An engine is one too many if the step ends no sooner with it than by this share.
_HELPS: Final = 0.005


class WindowPlan(NamedTuple):
    """In seconds from the decision."""

    window_s: float  # until the devices are taken back; inf: once the last response has ended
    end_s: float  # until the step is trained
    generated_s: float  # until the last response has ended, if the devices generate until then
    alone_s: float  # the same if they do not
    why: str


class ClosedWindow:
    """`now` is in seconds of any one clock."""

    tails = False

    def __init__(self) -> None:
        self.plan: WindowPlan | None = None  # the newest one
        self._lengths: Sequence[int] = ()  # of responses, rising
        self._sums: Sequence[int] = ()  # of so many of the shortest
        self._group_tokens = self._group_size = self._token_s = 0.0
        self._tail_s = 0.0  # by which generation behind a cut took longer than at the engines' full speed
        self._cut: tuple[float, float, frozenset[str]] | None = None  # when, forecast, fleet
        self._most = 0.0  # rollouts that an engine was seen to run
        self._fleet = frozenset[str]()
        self._asked = -inf

    def lends(self, left: WorkLeft, step: TrainerStep) -> bool:
        """Whether the devices are lent in a step that is about to be submitted. A short window would spread each group
        over all engines and then cut them all: without one, those that run first stay whole.
        """
        if not self._lengths or not left.engines:
            return True
        self.plan = self._planned(left, step)
        return self.plan.window_s > SOONEST_S

    def look_s(self, left: WorkLeft, step: TrainerStep) -> float:
        """While they are lent: seconds until the next decision; 0.0: they are taken back now."""
        self.plan = plan = self._planned(left, step)
        if plan.window_s <= 0.5 * SOONEST_S or (not step.local and plan.window_s < inf):  # nobody generates on them
            return 0.0
        return min(max(_LOOK_SHARE * plan.window_s, SOONEST_S), LATEST_S, plan.window_s)

    def spell_s(self, left: WorkLeft, step: TrainerStep) -> float:
        """How long the devices will probably stay lent to a trainer that waits for all groups; 0.0: unknown."""
        generated_s = self._planned(left, step).generated_s
        return generated_s if generated_s < inf else 0.0

    def closed(self, now: float, left: WorkLeft, step: TrainerStep) -> None:
        """They were taken back, with groups missing or not."""
        self._fleet = elsewhere_of(left, step.local)
        if self.tails and self.plan is not None and self.plan.alone_s < inf:
            self._cut = now, self._planned(left, step).alone_s, self._fleet

    def lends_again(self, now: float, left: WorkLeft, step: TrainerStep) -> bool:
        """Whether the trainer, which has its devices and waits for groups, lends them once more in this step."""
        if now - self._asked < AGAIN_S or not step.local:
            return False
        self._asked = now
        elsewhere = elsewhere_of(left, step.local)
        if elsewhere and not (
            self._fleet - elsewhere and self._planned(left, step).window_s > step.on_s + step.off_s + SOONEST_S
        ):
            return False
        self._fleet = elsewhere
        return True

    def surplus(self, left: WorkLeft, step: TrainerStep) -> str:
        """The spot engine that the step ends no later without, the one with the fewest rollouts; "": none is."""
        found = zip(left.engines, left.spot, left.rollouts, left.speeds, strict=True)
        spots = [(rollouts, speed, name) for name, spot, rollouts, speed in found if spot and name not in step.local]
        if len(spots) < 2 or not self._lengths:
            return ""
        _, speed, name = min(spots)
        with_it, without = self._planned(left, step).end_s, self._planned(left, step, less=speed).end_s
        return name if without <= (1.0 + _HELPS) * with_it else ""

    def trained(self, step: TrainedStep, left: WorkLeft | None, local: Collection[str]) -> None:
        """Learn from a step."""
        if self._cut is not None and left is not None and self._cut[2] == elsewhere_of(left, local):
            self._tail_s = max(0.0, step.generated_at - self._cut[0] - self._cut[1])
        self._cut = None
        lengths = sorted(length for group in step.responses for length in group)
        if lengths and step.learning_s > 0:
            self._lengths, self._sums = lengths, list(accumulate(lengths))
            self._group_size = len(lengths) / len(step.responses)
            self._group_tokens = step.tokens / len(step.responses)
            self._token_s = step.learning_s / step.tokens

    def _planned(self, left: WorkLeft, step: TrainerStep, *, less: float = 0.0) -> WindowPlan:
        """`less`: without so much of the engines elsewhere."""
        coming = max(0, step.missing - left.open - left.ended)
        remote = _remote(left, step, coming=coming > 0) - less
        local = sum(one for name, one in zip(left.engines, left.speeds, strict=True) if name in step.local)
        if not self._lengths:
            return _untaught(remote, local, left, step)
        weight = max(1.0, left.open / len(left.groups)) if left.groups else 1.0
        made = [one for group in left.groups for one in (*group.running, *group.waiting)]
        out = weight * len(made) + coming * self._group_size
        tokens = weight * sum(map(self._rest, made)) + coming * self._group_size * self._rest(0)
        running = weight * sum(len(group.running) for group in left.groups)
        self._most = max(self._most, running / max(1e-9, remote + local), float(left.fits))
        context = (weight * sum(made) + 0.5 * tokens) / max(1.0, out) + self._prompt(left)
        training_s = (
            step.ready_tokens + (left.open + left.ended + coming) * self._group_tokens
        ) * self._token_s + step.off_s
        alone = self._tokens_per_s(left, remote, out, context)
        together = self._tokens_per_s(left, remote + (local or 1.0), out, context)
        generated_s = tokens / together
        if remote <= 0.0:
            return WindowPlan(inf, generated_s + training_s, generated_s, inf, "no engine elsewhere generates")
        window_s = max(0.0, tokens - alone * (training_s - self._tail_s)) / together
        end_s = max(window_s + training_s, tokens / alone if not window_s else 0.0)
        return WindowPlan(
            window_s,
            end_s,
            generated_s,
            tokens / alone,
            f"{tokens:.0f} tokens are to come, and {training_s:.1f} s of training",
        )

    def _prompt(self, left: WorkLeft) -> float:
        return fmean(one.prompt for one in left.groups) if left.groups else self._group_tokens / self._group_size

    def _rest(self, made: int) -> float:
        """Tokens to come of a response that has `made` so many: what the longer ones of the last step still had."""
        shorter = bisect_right(self._lengths, made)
        longer = len(self._lengths) - shorter
        if not longer:
            return 0.5 * self._lengths[-1]
        return (self._sums[-1] - (self._sums[shorter - 1] if shorter else 0)) / longer - made

    def _tokens_per_s(self, left: WorkLeft, engines: float, out: float, context: float) -> float:
        if engines <= 0.0:
            return 1e-9
        load = max(1.0, min(out / engines, max(_BATCH, self._most)))
        return min(engines, max(out, 1.0)) * load / _pace(left).seconds(load, context)


def _untaught(remote: float, local: float, left: WorkLeft, step: TrainerStep) -> WindowPlan:
    share = max(_UNTAUGHT, 1.0 - remote / local) if local > 0.0 else _UNTAUGHT
    complete = step.complete + left.ended
    groups = complete + left.open
    over = remote > 0.0 and complete >= share * groups
    return WindowPlan(0.0 if over else inf, inf, inf, inf, "no step has ended yet")


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


def _pace(left: WorkLeft) -> EnginePace:
    if not (left.step_s or left.rollout_s or left.context_s):
        return EnginePace()
    return EnginePace(step_s=left.step_s, rollout_s=left.rollout_s, context_s=left.context_s)


class TailWindow(ClosedWindow):
    """With the last step's tail."""

    tails = True
