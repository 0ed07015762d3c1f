"""Decides by the slack of served requests how much rollout work the borrowing engine's next step may take: our decider.

After the co-serving executor of ROSE (arXiv 2605.06534), which admits rollouts or refuses them by that slack. Here the
budget is sized to the slack less the rollout step's own duration, and predictions are learnt online.

Invariant: every request is in `_book` from its arrival to its end, and no step may begin that is predicted to end after
the slack of a request. All of it is lost with the process: a new governor knows nothing, and begins with small budgets.
"""

from bisect import bisect_right
from math import inf
from typing import Final

from ebbtide.serving_guard.governor.budget_decider import (
    NOTHING_INSIDE,
    BudgetDecider,
    BudgetDecision,
    LatencyTargets,
    LearntCosts,
    StepLimits,
)
from ebbtide.serving_guard.governor.costs import StepTime, UnloadedLatency
from ebbtide.serving_guard.governor.served_requests import AttainmentHeadroom, LatencyModel, SlackBook
from ebbtide.serving_guard.governor.traffic_rhythm import TrafficRhythm
from ebbtide.types.grants import GRANT_S, Budget

#: A budget grows by one step of its ramp in this much calm.
_PERIOD_S: Final = 0.01
#: The step itself may take this part of the slack; it has to begin in the rest.
_OF_SLACK: Final = 0.8
#: One in `_PROBED` requests that arrive while nothing is inside is served without rollouts, to learn its latency. If
#: sharing is not worth it, one in `_RISKED` is served with rollouts: too few to be seen in a 99th percentile.
_PROBED, _RISKED = 16, 256
#: An aim stays the same while it and the delay that it allows change by less than this part, because the deadlines of
#: all requests follow from it.
_SAME: Final = 0.05
#: Less of a delay, as a part of the unloaded time of a token, is not worth a step.
_LEAST_DELAY: Final = 0.01
#: Sharing begins if it gains this much per second of it, and goes on if it gains at least the second value. A smaller
#: gain comes from idle time too, later, without slowing served tokens down. Under load sharing gains more: delayed
#: requests decode in larger batches, and idle time is scarce.
_WORTH, _WORTH_LESS = 0.4, 0.3
_BATCHING: Final = 0.75
#: If an overlap delays a request by this multiple of it, it is better to wait for the step's end.
_HARMFUL: Final = 1.5


class Governor(BudgetDecider):
    """Learns from each event, and decides by the slack of the requests inside."""

    def __init__(self, targets: LatencyTargets, limits: StepLimits) -> None:
        self._targets, self._limits = targets, limits
        self._least = max(1, min(limits.first_tokens, limits.tokens))
        self._unloaded, self._steps = UnloadedLatency(), StepTime(self._least)
        self._lessons = LatencyModel(self._unloaded, self._steps)
        self._book = SlackBook(self._unloaded)
        self._quiet = Quiet(limits.quiet_s, limits.quiet_least_s, limits.quiet_most_s)
        self._alone, self._beside = Ramp(_PERIOD_S), Ramp(_PERIOD_S)
        allowed = 1.0 - targets.percentile / 100.0
        self._rhythm, self._headroom = TrafficRhythm(allowed), AttainmentHeadroom(allowed)
        self._ttft, self._tpot = targets.ttft_s, targets.tpot_s  # the targets in seconds; 0.0: not known yet
        self._aim = 0.0  # for a request's mean TPOT; 0.0: no sharing
        self._delay = 0.0  # the part of it that rollouts may take
        #: Whether a step ran beside served work since a request last ended; False: none did, because such steps are
        #: thought to take too long; None: none did for another reason.
        self._shared_step: bool | None = None
        self._seen = 0  # requests inside, as observed from outside
        self._others = 0  # requests inside that are reported to other governors
        self._others_came = self._others_left = -inf  # when their number last became positive, and zero
        self._left = self._came_at = -inf  # when the last request left, and when one came while nothing was inside
        self._probe: str | None = None  # a request that is served the other way, with or without rollouts
        self._sized: int | None = None  # tokens of a step, by its own duration only; None: to be computed
        self._worth = True  # whether sharing pays, as far as known
        self._solo_requests = 0  # that came while nothing was inside
        self._granted = False

    def arrived(self, now: float, request: str, prompt_tokens: int, *, streamed: bool = True) -> None:
        first = not self._book
        if first:
            self._solo_requests += 1
            self._probe = request if self._solo_requests % (_PROBED if self._worth else _RISKED) == 0 else None
            self._become_busy(now)
        alone = first and not self._others
        self._book.arrive(request, self._lessons.arrived(now, prompt_tokens, alone=alone, streamed=streamed))

    def produced(self, now: float, request: str, tokens: int) -> None:
        before = self._book.last(request)
        beside = self._book.beside(request)
        served = self._book.produce(request, now, tokens, self._lessons.beside)
        if served is None:
            return
        if before is None:
            self._lessons.began(served, self._ttft or inf)
            return
        if not self._book.waiting and not self._others:
            self._lessons.went_on(served, before, self._book.decoding, self._lessons.beside - beside)

    def ended(self, now: float, request: str, ok: bool) -> None:
        served = self._book.end(request)
        if served is None:
            return
        self._lessons.ended(now, served, self._tpot or inf, ok=ok)
        self._rhythm.served(now, missed=served.missed)
        if ok and served.streamed and (own_s := served.own_tpot_s(self._delay)) > 0.0:
            self._headroom.served(own_s, self._tpot or inf, missed=served.missed)
        if self._shared_step is False:
            self._steps.doubt_beside()
        self._shared_step = None
        self._resolve(now)
        if served.missed:
            self._beside.cut(now, self._beside.level)
        if request == self._probe:
            self._probe = None
        if not self._book:
            self._become_idle(now)

    def elsewhere(self, now: float, inside: int) -> None:
        before, self._others = self._others, inside
        if inside != before:
            self._lessons.disturbed(now)
        if inside and not before:
            self._others_came = now
        elif before and not inside:
            self._others_left = now

    def observed(self, now: float, inside: int, waiting: int) -> None:  # noqa: ARG002 - no sharing with unknown requests
        before, self._seen = self._seen, inside
        if inside and not before:
            self._become_busy(now)
        elif before and not inside:
            self._become_idle(now)

    def stepped(self, now: float, tokens: int, seconds: float) -> None:
        begin = now - seconds
        busy = self._busy or self._others > 0
        beside = busy or max(self._left, self._others_left) > begin
        since = min(self._came_at if self._busy else inf, self._others_came if self._others else inf)
        wholly = beside == busy and not (busy and since > begin)
        if self._steps.overran(tokens, seconds, beside=beside):
            if beside:
                self._beside.cut(now, self._beside.level)
            else:
                self._alone.cut(now, tokens / self._limits.tokens)
        self._lessons.stepped(now, tokens, seconds, beside=beside if wholly else None)
        self._sized = None

    def decide(self, now: float) -> BudgetDecision:
        decision = self._shared(now) if self._busy else self._idle(now)
        granted = decision.budget.tokens > 0
        if granted:
            self._lessons.may_step(decision.budget.until)
        elif self._granted:
            self._lessons.may_not_step(now)
        if granted != self._granted:
            self._granted = granted
            self._rhythm.grant(now, granted)
        return decision

    def hold_s(self, now: float, stepping_since: float | None) -> float:
        if stepping_since is None or self._lessons.contention_at_least < _HARMFUL:
            return 0.0
        return min(self._limits.hold_s, max(0.0, stepping_since + self._steps.usual_s - now))

    def learnt(self, now: float) -> LearntCosts:
        return LearntCosts(
            ttft_target_s=self._ttft,
            tpot_target_s=self._tpot,
            unloaded_ttft_s=self._unloaded.ttft_s(self._targets.percentile),
            unloaded_tpot_s=self._unloaded.tpot_s(self._targets.percentile),
            step_s=self._steps.most_s,
            forecast=self._rhythm.forecast(now),
        )

    def pays(self, now: float, wake_s: float) -> bool:
        return self._rhythm.pays(now, wake_s)

    @property
    def _busy(self) -> bool:
        return bool(self._book) or self._seen > 0

    def _become_busy(self, now: float) -> None:
        """The first request is inside."""
        self._came_at = now
        self._quiet.came(now - self._left, self._steps.usual_s)
        self._rhythm.turn(now, busy=True)

    def _become_idle(self, now: float) -> None:
        """The last request has left."""
        self._left = now
        self._rhythm.turn(now, busy=False)

    def _idle(self, now: float) -> BudgetDecision:
        self._rhythm.turn(now, busy=False)
        quiet_until = self._left + self._quiet.seconds
        if now < quiet_until:
            return BudgetDecision(Budget(), "quiet", NOTHING_INSIDE, quiet_until)
        level = self._alone.calm(now)
        tokens = self._most(level)
        budget = Budget(tokens, min(self._limits.sequences, tokens), now + GRANT_S)
        return BudgetDecision(budget, "idle", NOTHING_INSIDE, now + (GRANT_S / 3 if level == 1.0 else _PERIOD_S))

    def _most(self, level: float) -> int:
        """Tokens of a step by itself: of a size that was seen, within its share of the TTFT target, and at the ramp's
        level."""
        most = self._limits.tokens
        if self._sized is None:
            within = self._steps.tokens_within(self._limits.step_share * self._ttft if self._ttft else inf)
            self._sized = min(most, self._steps.tokens_within(inf), within)
        return max(self._least, min(self._sized, int(level * most)))

    def _shared(self, now: float) -> BudgetDecision:
        aim_tpot = self._aim if self._worth == (self._probe is None) else 0.0
        aim_gap = self._targets.aim_gap * self._tpot
        point = self._book.point(self._targets.aim_ttft * self._ttft, aim_tpot, aim_gap) if not self._seen else -inf
        slack = max(0.0, point - now)
        level = self._beside.calm(now) if slack > 0.0 else self._beside.level
        room = slack - (1.0 - level) * aim_gap
        tokens = 0
        if room > 0.0 and now >= self._left + self._quiet.seconds:
            tokens = min(self._most(self._alone.level), self._steps.tokens_within(_OF_SLACK * room, beside=True))
            if self._shared_step is None and self._steps.tokens_within(_OF_SLACK * room) >= self._least:
                self._shared_step = False
        if tokens < self._least:
            return BudgetDecision(Budget(), "reclaimed", slack, now + GRANT_S / 3)
        self._shared_step = True
        until = min(now + GRANT_S, now + room - self._steps.predicted(tokens, beside=True))
        budget = Budget(tokens, min(self._limits.sequences, tokens), until)
        return BudgetDecision(budget, "shared", slack, min(until, now + GRANT_S / 3))

    def _resolve(self, now: float) -> None:
        """Compute the targets that are factors, the aim, and whether to share, from what was learnt."""
        targets, self._sized = self._targets, None
        if not targets.ttft_s:
            self._ttft = targets.ttft_factor * self._unloaded.ttft_s(targets.percentile)
        if not targets.tpot_s:
            self._tpot = targets.tpot_factor * self._unloaded.tpot_s(targets.percentile)
        if self._lessons.forget_other_speeds():
            self._worth = True
        gained, load = self._lessons.gained, self._rhythm.load(now)
        if gained is not None:
            self._worth = gained + _BATCHING * load * load > (_WORTH_LESS if self._worth else _WORTH)
        usual = self._unloaded.usual_decode_s
        delay = self._allowed_delay(usual) if usual < self._tpot else 0.0
        aim = usual + delay if delay else 0.0
        if abs(delay - self._delay) > _SAME * delay or abs(aim - self._aim) > _SAME * aim:
            self._aim, self._delay = aim, delay

    def _allowed_delay(self, usual: float) -> float:
        """By which rollouts may slow a token that takes `usual` seconds; 0.0: not at all."""
        targets = self._targets
        room = targets.aim_tpot * (self._tpot - usual)
        delay = min(room, (targets.aim_slowed - 1.0) * usual, self._headroom.within(self._tpot))
        return delay if delay >= _LEAST_DELAY * usual else 0.0


LEAST: Final = 1.0 / 16
#: From nothing to everything in eight calm periods, and sixteen times slower near the level of the last trouble.
_GROWTH: Final = 1.0 / 8
_SLOW_GROWTH: Final = 1.0 / 128
_NEAR: Final = 0.75
_CUT: Final = 0.5
#: After more than this many periods between two calls of `calm`, rollouts have not run all the time.
_RESTS: Final = 4
#: The level of the last trouble is kept for this long.
_FORGOTTEN_S: Final = 10.0
#: Candidates for the quiet time, as parts of the span between the least and the most.
_TRIED: Final = (0.0, 0.02, 0.06, 0.16, 0.36, 0.6, 1.0)
#: One second of a request's delay costs as much as this many seconds of idle time.
_DELAY_WEIGHS: Final = 4.0
_LONG_S: Final = 1.0  # longer gaps count as this
_ENOUGH: Final = 32
_FADE: Final = 1.0 - 1.0 / 256


class Ramp:
    """The share of capacity that rollouts use: less after trouble, more in calm. `period_s`: of calm, for one step of
    growth.

    Growth is additive and cuts are multiplicative (Chiu and Jain 1989). As in TCP, the level of the last trouble is
    kept: growth is slow near it and fast elsewhere, so the level converges instead of oscillating.

    Invariant: `level` is between `LEAST` and 1, and changes only by cuts and by calm. Neither the start of a training
    step nor the end of an idle spell resets it.
    """

    def __init__(self, period_s: float = 0.01) -> None:
        self._period = period_s
        self._trouble_level = 1.0
        self._trouble_at = self._grown_at = self._seen_at = float("-inf")
        self.level = 1.0

    def cut(self, now: float, used: float) -> None:
        """Cut the level after trouble while `used` of the capacity ran. There is one cut per period, because troubles
        close together have one cause."""
        if now - self._trouble_at < self._period:
            return
        used = min(self.level, used)
        self._trouble_level, self._trouble_at, self._grown_at, self._seen_at = used, now, now, now
        self.level = max(LEAST, _CUT * used)

    def calm(self, now: float) -> float:
        """Rollouts run without trouble: grow the level and return it."""
        if self.level >= 1.0:
            return 1.0
        if now - self._seen_at > _RESTS * self._period:  # time without rollouts is not calm
            self._grown_at = now
        self._seen_at = now
        while self._grown_at + self._period <= now and self.level < 1.0:
            self._grown_at += self._period
            near = _NEAR * self._trouble_level if now - self._trouble_at < _FORGOTTEN_S else 1.0
            self.level = min(1.0, max(self.level + _SLOW_GROWTH, min(near, self.level + _GROWTH)))
        return self.level


class Quiet:
    """Learns how long rollouts should wait after the last served request left, from how soon the next ones came: the
    time with the least cost. Waiting loses idle time, and a step without waiting delays the next request."""

    def __init__(self, first_s: float, least_s: float, most_s: float) -> None:
        self._tried = tuple(least_s + part * (most_s - least_s) for part in _TRIED)
        self._counts = [0.0] * (len(_TRIED) + 1)  # of gaps between two candidates
        self._sums = [0.0] * (len(_TRIED) + 1)
        self._seen = 0
        self.seconds = first_s

    def came(self, gap_s: float, step_s: float) -> None:
        """A request came `gap_s` after the last one had left; a rollout step takes `step_s`."""
        gap_s = min(gap_s, _LONG_S)
        for number in range(len(self._counts)):
            self._counts[number] *= _FADE
            self._sums[number] *= _FADE
        at = bisect_right(self._tried, gap_s)
        self._counts[at] += 1.0
        self._sums[at] += gap_s
        self._seen += 1
        if self._seen >= _ENOUGH:
            self.seconds = min(self._tried, key=lambda quiet: self._cost(quiet, step_s))

    def _cost(self, quiet: float, step_s: float) -> float:
        """Idle seconds lost, and the delay of requests that come after the quiet time: half a step each."""
        at = self._tried.index(quiet)
        short, longer = sum(self._sums[: at + 1]), sum(self._counts[at + 1 :])
        return short + longer * (quiet + _DELAY_WEIGHS * 0.5 * step_s)
