"""How much memory for keys and values rollouts may hold beside a served engine.

Invariant: what is allowed never exceeds the limit less what serving uses and a headroom for what it takes next. It
falls at once, by exactly as much as serving needs and as often as it needs. Once serving has held little for a quiet
time, below a second, all of it comes back at once: the next burst takes it back within a step. While serving holds
more, it grows in steps up to what its last peaks left, so that nothing goes to and fro within a burst. A cut that took
something away right after a growth makes the next quiet time longer. Nothing is allowed rather than less than what the
longest rollout needs, which would stand still with it. ROSE (arXiv 2605.06534) halves once and then stays frozen until
the next RL step: a burst of seconds costs it minutes.
"""

from collections import deque
from typing import Final

from msgspec import Struct

NORMAL: Final = "normal"  # rollouts have all that they could have beside an idle served engine
PRESSURE: Final = "pressure"  # what serving uses bounds them, or did a moment ago
CUT: Final = "cut"  # more is in use than allowed: it is being given back
REGROW: Final = "regrow"  # growing again

#: Growth is stopped this far, as a share of the limit, below the line at which it would be cut: a single served
#: request that comes and goes must not move it.
_SLACK: Final = 0.03
#: What is cut within this time after it grew brought less than it costs to read again.
_SOON_S: Final = 1.0
#: A quiet time that was made longer is made shorter again after so long without such a cut.
_FORGIVEN_S: Final = 10.0


class KvRules(Struct, frozen=True, kw_only=True):
    """`headroom` to `headroom_most`: shares of the limit that stay free for serving, as much of it as serving took at
    most within `react_s` (the time that a cut takes) in the last `remember_s`. After a cut nothing grows for `quiet_s`
    seconds, at most `quiet_most_s`. After as long with no more than `little` of the limit in use by serving, all comes
    back; before, `step` of what rollouts could have, each `step_s`, up to what the highest use in `burst_s` leaves."""

    headroom: float = 0.05
    headroom_most: float = 0.15
    react_s: float = 0.25
    remember_s: float = 30.0
    little: float = 0.1
    quiet_s: float = 0.1
    quiet_most_s: float = 0.4
    burst_s: float = 3.0
    step: float = 0.125
    step_s: float = 0.25


class KvAllowance(Struct, frozen=True):
    """`kv_bytes` that rollouts may hold. `phase`: see the constants. `short`: bytes that serving and the least
    headroom lack even if rollouts held nothing."""

    kv_bytes: int
    phase: str
    short: int = 0


class KvBudget:
    """See the module. One for each served engine; `full` is what rollouts can hold at all, in bytes."""

    def __init__(self, rules: KvRules | None = None) -> None:
        self._rules = rules or KvRules()
        self._rises = KvRises(self._rules.react_s, self._rules.remember_s)
        self._peaks = KvPeaks(self._rules.burst_s)
        self._allowed: int | None = None
        self._quiet_s = self._rules.quiet_s
        self._cut_at = self._much_at = self._grown_at = self._lost_at = float("-inf")
        self._growing = False

    def update(self, now: float, *, serving: int, rollout: int, limit: int, full: int, least: int = 0) -> KvAllowance:
        """What rollouts may hold from `now` on: `serving` and `rollout` bytes are in use, of a `limit` for both; the
        longest rollout needs `least`."""
        reserve = self._reserve(now, serving, limit)
        line = max(0, min(full, limit - serving - reserve))
        most = max(0, min(full, limit - reserve))
        if serving > limit * self._rules.little:
            self._much_at = now
        peak = self._peaks.add(now, serving)
        if self._allowed is None or self._allowed > line:
            self._cut(now, line, rollout)
        else:
            # All that an idle served engine leaves is taken whole; of less, not all to the very line.
            whole = now - max(self._cut_at, self._much_at) >= self._quiet_s
            below = line if whole else min(full, limit - peak - reserve)
            self._grow(now, below if below >= most else below - int(limit * _SLACK), most, whole=whole)
        allowed = self._enough(line, least, most)
        short = max(0, serving + int(limit * self._rules.headroom) - limit)
        return KvAllowance(allowed, self._phase(allowed, rollout, most), short)

    def _enough(self, line: int, least: int, most: int) -> int:
        """What is allowed, but nothing between none and `least`."""
        allowed = self._allowed or 0
        least = min(least, most)  # what needs more than there ever is waits for nothing
        if 0 < allowed < least:
            allowed = least if self._growing and least <= line else 0
            self._allowed = max(allowed, self._allowed or 0)
        return allowed

    def _reserve(self, now: float, serving: int, limit: int) -> int:
        """Kept free for serving: what it took at its fastest, within bounds."""
        rise = self._rises.add(now, serving)
        least, most = int(limit * self._rules.headroom), int(limit * self._rules.headroom_most)
        return max(least, min(most, rise))

    def _cut(self, now: float, line: int, rollout: int) -> None:
        rules = self._rules
        if self._allowed is not None:
            self._cut_at = now
            if rollout > line:  # a cut into what nobody held cost nothing
                if now - self._grown_at < _SOON_S:
                    self._quiet_s = min(rules.quiet_most_s, 2 * self._quiet_s)
                self._lost_at = now
        self._allowed, self._growing = line, False

    def _grow(self, now: float, goal: int, most: int, *, whole: bool) -> None:
        rules, allowed = self._rules, self._allowed or 0
        if now - self._lost_at > _FORGIVEN_S:
            self._quiet_s = max(rules.quiet_s, self._quiet_s / 2)
            self._lost_at = now
        self._growing = goal > allowed and now - self._cut_at >= self._quiet_s
        if self._growing and (whole or now - self._grown_at >= rules.step_s):
            self._allowed = goal if whole else min(goal, allowed + max(1, int(most * rules.step)))
            self._grown_at = now

    def _phase(self, allowed: int, rollout: int, most: int) -> str:
        if rollout > allowed:
            return CUT
        if allowed >= most:
            return NORMAL
        return REGROW if self._growing else PRESSURE


class KvPeaks:
    """The highest value of the last `window_s`."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._lately: deque[tuple[float, int]] = deque()  # falling values: the first is the highest

    def add(self, now: float, value: int) -> int:
        lately = self._lately
        while lately and lately[-1][1] <= value:
            lately.pop()
        lately.append((now, value))
        while lately[0][0] < now - self._window_s:
            lately.popleft()
        return lately[0][1]


class KvRises:
    """The largest rise of a value within `window_s` that was seen in the last `remember_s` (at most twice as long)."""

    def __init__(self, window_s: float, remember_s: float) -> None:
        self._window_s = window_s
        self._remember_s = remember_s
        self._lately: deque[tuple[float, int]] = deque()  # rising values: the first is the lowest of the window
        self._now = self._before = 0
        self._since = float("-inf")

    def add(self, now: float, value: int) -> int:
        lately = self._lately
        while lately and lately[-1][1] >= value:
            lately.pop()
        lately.append((now, value))
        while lately[0][0] < now - self._window_s:
            lately.popleft()
        if now - self._since >= self._remember_s:
            # A first value is no rise, and what is older than two spans is forgotten whole.
            self._before = self._now if now - self._since < 2 * self._remember_s else 0
            self._now, self._since = 0, now
        self._now = max(self._now, value - lately[0][1])
        return max(self._now, self._before)
