"""Decides when a trainer's devices, which generate between its steps, are taken back, and when they are lent again.

RLBoost (arXiv 2510.19225, section 4.3) lends them for a window that follows the idle times of former steps. Here the
window follows from what is left. With W seconds of work for one typical engine, engines of n times its speed elsewhere
and of N times its speed on the trainer's devices, and t seconds of training, both sides end together if

    T = (W - n t) / (n + N)

This is `closed_form_s`. It has no tail, no groups and no cost of the cut, so it is only the first of a few windows that
are compared by a forecast of the step's end (`generation_forecast`). Gradients are computed group by group, so the end
is the latest over all groups of the group's completion plus the training of all that complete with it or later. The
forecast is weighed with learnt errors of both sides, and made again whenever something changed, from what is left then.
So a window ends early when the rest is finished sooner than predicted, and follows a fleet that changes in mid-step.

A trainer whose ranks share weights and optimiser computes no gradient until all of its devices are back. So they are
wanted at one moment, and each is told to end before that by its own switch. A device without rollouts returns at once.

Invariant: all that is learnt is in the learners. Lost with the process; one step teaches it again.
"""

from collections.abc import Iterable, Sequence
from itertools import chain
from math import inf
from statistics import fmean
from typing import Final

import numpy as np

from ebbtide.scheduling.elastic.fading_quantiles import FadingQuantiles
from ebbtide.scheduling.elastic.generation_forecast import EngineTerms, ForecastRollout, GenerationForecast, GroupEnds
from ebbtide.scheduling.elastic.group_lengths import GroupLeft, GroupLengths
from ebbtide.scheduling.elastic.loan_view import LoanPlan, LoanView

#: Groups that stand for all where there are more. A decision takes less than ten milliseconds with so many of eight.
_SAMPLE: Final = 96
#: Quantiles of both sides' errors that a window is weighed with. A wider spread makes windows longer than is good:
#: large errors of both sides seldom come together.
_WEIGHED: Final = (0.3, 0.5, 0.7)
#: Windows to compare, as multiples of the closed form's.
_MULTIPLES: Final = (0.6, 0.85, 1.0, 1.2, 1.5)
#: Further ones, as shares of the rest of generation without the devices.
_SHARES: Final = (0.03, 0.08, 0.16, 0.3)
#: Halvings of the distance between the best window and its neighbours.
_REFINEMENTS: Final = 3
#: Until a step has taught lengths and training times, training is taken to last as long as generation on the trainer's
#: own engines would. Then the closed form leaves a share of 1 - n / N to the window. The first gradients need some
#: groups, so the devices return when that share of them is complete, and at least this one.
_UNTAUGHT: Final = 0.1
#: A device is lent again only if the step ends sooner by so large a share of what is left of it: forecasts are not
#: better than that.
_WORTH: Final = 0.05
#: An engine is too many if the step ends no sooner with it than by this share.
_HELPS: Final = 0.005
#: A forecast's error in a single step says little; these stand for the first ones.
_ERRORS: Final = (0.9, 1.1, 1.4)
#: A forecast that is wrong by more than this factor was made for a step that went otherwise: it counts as this.
_WORST: Final = 2.0


def closed_form_s(work_s: float, training_s: float, remote: float, local: float) -> float:
    """The window T after which training and the rest of generation end together, in seconds; at least 0.

    `work_s`: of one typical engine; `training_s`: from the return of the devices on; `remote` and `local`: the engines'
    speeds, in units of a typical one. inf without engines elsewhere.
    """
    if remote <= 0.0:
        return inf
    return max(0.0, (work_s - remote * training_s) / (remote + local))


class WindowPlanner:
    """Learns from steps, and plans the window of each."""

    def __init__(self) -> None:
        self.lengths = GroupLengths()
        self._token_s = FadingQuantiles()  # of training
        self._errors = FadingQuantiles(_ERRORS)  # of generation behind a window, actual over forecast

    def trained(self, tokens: int, seconds: float) -> None:
        """Learn that gradients of so many tokens, prompts included, took so long on all devices."""
        if tokens > 0 and seconds > 0:
            self._token_s.observe(seconds / tokens)

    def generated(self, forecast_s: float, actual_s: float) -> None:
        """Learn how long generation went on behind a window. Leave out steps in which the fleet changed meanwhile."""
        if forecast_s > 0 and actual_s > 0:
            self._errors.observe(min(max(actual_s / forecast_s, 1.0 / _WORST), _WORST))

    def plan(self, view: LoanView) -> LoanPlan:
        """When the devices return, if they generate now. Call with at least one device."""
        if not self._token_s.known or not self.lengths.known:
            return self._untaught(view)
        step = _Forecasts(view, self.lengths)
        off_s = max(device.off_s for device in view.devices)
        token_s = self._token_s.quantile(0.5)
        closed_s = closed_form_s(step.work_s, off_s + step.tokens * token_s, view.remote, step.local)
        tried = {cut_s: self._end_s(step, cut_s, off_s) for cut_s in _tried(closed_s, step.generated_s(0.0))}
        for _ in range(_REFINEMENTS):
            best_s = _best(tried)
            if best_s == inf:
                break
            tried |= {cut_s: self._end_s(step, cut_s, off_s) for cut_s in _between(sorted(tried), best_s)}
        best_s = _best(tried)
        return LoanPlan(
            window_s=best_s,
            return_s={one.name: best_s + off_s - one.off_s if one.busy else 0.0 for one in view.devices},
            end_s=tried[best_s],
            closed_s=closed_s,
            generated_s=step.generated_s(best_s),
            why=_reason(best_s, tried),
        )

    def lends_again(self, view: LoanView) -> bool:
        """Whether devices that are the trainer's, and idle, are worth lending once more in this step."""
        if not view.groups or not view.devices or not self._token_s.known or not self.lengths.known:
            return False
        step = _Forecasts(view, self.lengths)
        switch_s = max(device.on_s + device.off_s for device in view.devices)
        kept_s = self._end_s(step, 0.0, 0.0)
        rest_s = step.generated_s(0.0)
        lengths_s = (rest_s * share for share in (0.25, 0.5, 0.75)) if rest_s < inf else (inf,)
        lent_s = min(self._end_s(step, cut_s, 0.0) for cut_s in lengths_s) + switch_s
        return lent_s < (1.0 - _WORTH) * kept_s

    def surplus(self, view: LoanView, engine: float) -> bool:
        """Whether the step would end no later without one engine elsewhere of such a speed: it may be released."""
        if not self._token_s.known or not self.lengths.known or view.remote <= engine:
            return False
        with_it, without = self._step_s(view, view.remote), self._step_s(view, view.remote - engine)
        return without <= (1.0 + _HELPS) * with_it

    def _step_s(self, view: LoanView, remote: float) -> float:
        return self.plan(_with_remote(view, remote)).end_s

    def _untaught(self, view: LoanView) -> LoanPlan:
        groups = view.complete + len(view.groups)
        local = sum(device.speed for device in view.devices)
        share = max(_UNTAUGHT, 1.0 - view.remote / local) if local > 0 else _UNTAUGHT
        at_s = 0.0 if view.remote > 0 and view.complete >= share * groups else inf
        names = {device.name: at_s for device in view.devices}
        return LoanPlan(
            window_s=at_s, return_s=names, end_s=inf, closed_s=inf, generated_s=inf, why="no step has ended yet"
        )

    def _end_s(self, step: "_Forecasts", cut_s: float, off_s: float) -> float:
        """The mean end of the step, over what both sides may take."""
        token_s = [self._token_s.quantile(share) for share in _WEIGHED]
        slower = [self._errors.quantile(share) for share in _WEIGHED]
        return step.mean_end_s(cut_s, off_s, token_s + token_s, slower[::-1] + slower)


class _Forecasts:
    """Forecasts of one step, by the window. Invariant: `_found` has those that were asked for."""

    def __init__(self, view: LoanView, lengths: GroupLengths) -> None:
        self._weight = max(1.0, len(view.groups) / _SAMPLE)
        sampled = _evenly(view.groups, _SAMPLE)
        rests = [lengths.rests(group, place) for place, group in enumerate(sampled)]
        rollouts = [
            one
            for number, (group, left) in enumerate(zip(sampled, rests, strict=True))
            for one in _rollouts(group, number, left)
        ]
        groups = [_tokens(group, left) for group, left in zip(sampled, rests, strict=True)]
        self._tokens = np.array(groups) * self._weight
        self._ready = view.ready_tokens
        context = fmean(one.context + 0.5 * one.rest for one in rollouts) if rollouts else 1.0  # until each ends
        batch = max(1.0, min(view.batch, view.kv_tokens / max(1.0, context)))
        self.local = sum(device.speed for device in view.devices)
        terms = EngineTerms(
            remote=view.remote,
            local=self.local,
            held=sum(device.speed for device in view.devices if device.busy),
            batch=batch,
            pace=view.pace,
            read_s=view.read_s,
        )
        self._forecast = GenerationForecast(rollouts, terms, weight=self._weight)
        self._found: dict[float, GroupEnds] = {}
        token_s = view.pace.seconds(batch, context) / batch  # of a full engine
        self.work_s = self._weight * sum(chain.from_iterable(rests)) * token_s
        self.tokens = self._ready + float(self._tokens.sum())

    def mean_end_s(self, cut_s: float, off_s: float, token_s: Sequence[float], slower: Sequence[float]) -> float:
        """When the last gradient is computed, in the mean over pairs of the time for a token's gradient, and of the
        factor by which generation behind the cut takes longer than forecast.
        """
        done, per_token = self._completions(cut_s), np.array(token_s)
        after = np.cumsum(self._tokens[done.group][::-1])[::-1]  # tokens of groups that complete then, or later
        ends = min(cut_s, self.generated_s(cut_s)) + off_s + (float(self._tokens.sum()) + self._ready) * per_token
        if len(after):
            before_s = np.minimum(done.end_s, cut_s)
            behind_s = np.maximum(done.end_s - before_s, 0.0) if cut_s < inf else np.zeros(len(after))
            each = before_s + np.outer(slower, behind_s) + np.outer(per_token, after)
            ends = np.maximum(ends, each.max(axis=1))
        return float(ends.mean())

    def generated_s(self, cut_s: float) -> float:
        done = self._completions(cut_s)
        return float(done.end_s[-1]) if len(done.end_s) else 0.0

    def _completions(self, cut_s: float) -> GroupEnds:
        found = self._found.get(cut_s)
        if found is None:
            found = self._found[cut_s] = self._forecast.groups(cut_s)
        return found


def _rollouts(group: GroupLeft, number: int, rests: Sequence[float]) -> Iterable[ForecastRollout]:
    running = len(group.running)
    for at, (made, rest) in enumerate(zip([*group.running, *group.waiting], rests, strict=True)):
        lent = at < group.lent if group.lent is not None and at < running else None
        yield ForecastRollout(rest, number, float(group.prompt + made), at < running, lent)


def _tokens(group: GroupLeft, rests: Sequence[float]) -> float:
    """Tokens that a group is trained on."""
    samples = len(group.finished) + len(group.running) + len(group.waiting)
    return samples * group.prompt + sum(group.finished) + sum(group.running) + sum(group.waiting) + sum(rests)


def _evenly(groups: Sequence[GroupLeft], most: int) -> Sequence[GroupLeft]:
    if len(groups) <= most:
        return groups
    return [groups[int(at * len(groups) / most)] for at in range(most)]


def _tried(closed_s: float, generated_s: float) -> Iterable[float]:
    """Windows to compare at first. The closed form misses the tail, so others are some shares of what generation takes
    if the devices return now.
    """
    yield from (0.0, inf)
    if 0.0 < closed_s < inf:
        yield from (closed_s * factor for factor in _MULTIPLES)
    if 0.0 < generated_s < inf:
        yield from (generated_s * share for share in _SHARES)


def _best(tried: dict[float, float]) -> float:
    """The window with the earliest end; of equal ones the shortest."""
    return min(tried, key=lambda cut_s: (tried[cut_s], cut_s))


def _between(windows: Sequence[float], best_s: float) -> Iterable[float]:
    at = windows.index(best_s)
    for other in windows[max(0, at - 1) : at + 2]:
        if other != best_s and other < inf:
            yield 0.5 * (best_s + other)


def _with_remote(view: LoanView, remote: float) -> LoanView:
    return LoanView(
        groups=view.groups,
        ready_tokens=view.ready_tokens,
        complete=view.complete,
        remote=remote,
        devices=view.devices,
        batch=view.batch,
        kv_tokens=view.kv_tokens,
        pace=view.pace,
        read_s=view.read_s,
    )


def _reason(best_s: float, tried: dict[float, float]) -> str:
    """Says why, for people."""
    if best_s == inf:
        return "the step ends soonest if the devices generate until the last rollout ends"
    if best_s == 0.0:
        return f"the step ends soonest ({tried[0.0]:.1f} s) if the devices are taken back now"
    return f"the step ends {tried[0.0] - tried[best_s]:.1f} s sooner if they generate for {best_s:.1f} s more"
