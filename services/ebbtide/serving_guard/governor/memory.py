"""Decides how much KV cache rollouts may hold beside a served engine, and where their weights stay.

The allowance falls at once by exactly what serving needs. After serving has held little for a quiet time, which is
below a second, all of it returns at once: the next burst takes it back within a step. While serving holds more, the
allowance grows in steps up to what serving's recent peaks left, so that it does not oscillate within a burst. If a cut
takes memory away soon after a growth, the next quiet time is longer. If the allowance is too small for the longest
rollout, it is zero, because that rollout could not run. ROSE (arXiv 2605.06534) halves the budget once and keeps it
until the next RL step: a burst of seconds costs it minutes.
"""

from collections import deque
from typing import Final

from msgspec import Struct

from ebbtide.types.grants import Residency

NORMAL: Final = "normal"  # rollouts may hold all that fits beside an idle served engine
PRESSURE: Final = "pressure"  # serving's use limits them, or did a moment ago
CUT: Final = "cut"  # rollouts hold more than allowed, and are giving it back
REGROW: Final = "regrow"  # the allowance grows again

#: Growth stops this far below the bound, as a share of the limit, so that a single served request causes no cut.
_SLACK: Final = 0.03
#: Memory that is cut this soon after it grew gained less than it costs to compute its content again.
_SOON_S: Final = 1.0
#: A longer quiet time is shortened again after this time without such a cut.
_FORGIVEN_S: Final = 10.0


class KvRules(Struct, frozen=True, kw_only=True):
    """How the allowance follows serving's use. Shares are of the limit unless stated."""

    headroom: float = 0.05  # share that always stays free for serving
    headroom_most: float = 0.15  # most that stays free: serving's largest rise within `react_s` in `remember_s`
    react_s: float = 0.25  # the time that a cut takes
    remember_s: float = 30.0
    little: float = 0.1  # all memory returns once serving has used less than this share for the quiet time
    quiet_s: float = 0.1  # without growth after a cut
    quiet_most_s: float = 0.4
    burst_s: float = 3.0  # in a burst, growth stops at what serving's highest use in this time leaves
    step: float = 0.125  # of growth in a burst, as a share of what rollouts could have
    step_s: float = 0.25


class KvAllowance(Struct, frozen=True):
    """What rollouts may hold."""

    kv_bytes: int
    phase: str  # one of the constants above
    short: int = 0  # bytes that serving and the least headroom lack even if rollouts hold nothing


class KvBudget:
    """Follows the use of one served engine.

    Invariant: the allowance never exceeds the limit less serving's use and a headroom for its growth.
    """

    def __init__(self, rules: KvRules | None = None) -> None:
        self._rules = rules or KvRules()
        self._rises = KvRises(self._rules.react_s, self._rules.remember_s)
        self._peaks = KvPeaks(self._rules.burst_s)
        self._allowed: int | None = None
        self._quiet_s = self._rules.quiet_s
        self._cut_at = self._much_at = self._grown_at = self._lost_at = float("-inf")
        self._growing = False

    def update(self, now: float, *, serving: int, rollout: int, limit: int, full: int, least: int = 0) -> KvAllowance:
        """The allowance from `now` on, in bytes. `serving` and `rollout` are in use, of a `limit` for both; rollouts
        could hold `full`; the longest rollout needs `least`."""
        reserve = self._reserve(now, serving, limit)
        bound = max(0, min(full, limit - serving - reserve))
        most = max(0, min(full, limit - reserve))
        if serving > limit * self._rules.little:
            self._much_at = now
        peak = self._peaks.add(now, serving)
        if self._allowed is None or self._allowed > bound:
            self._cut(now, bound, rollout)
        else:
            # Beside an idle served engine all of it is used; otherwise growth stops below the bound.
            whole = now - max(self._cut_at, self._much_at) >= self._quiet_s
            goal = bound if whole else min(full, limit - peak - reserve)
            self._grow(now, goal if goal >= most else goal - int(limit * _SLACK), most, whole=whole)
        allowed = self._usable(bound, least, most)
        short = max(0, serving + int(limit * self._rules.headroom) - limit)
        return KvAllowance(allowed, self._phase(allowed, rollout, most), short)

    def _usable(self, bound: int, least: int, most: int) -> int:
        """The allowance, which is either 0 or at least `least`."""
        allowed = self._allowed or 0
        least = min(least, most)  # a rollout that needs more than that can never run
        if 0 < allowed < least:
            allowed = least if self._growing and least <= bound else 0
            self._allowed = max(allowed, self._allowed or 0)
        return allowed

    def _reserve(self, now: float, serving: int, limit: int) -> int:
        """Bytes kept free for serving: its fastest rise, within the rules' shares."""
        rise = self._rises.add(now, serving)
        least, most = int(limit * self._rules.headroom), int(limit * self._rules.headroom_most)
        return max(least, min(most, rise))

    def _cut(self, now: float, bound: int, rollout: int) -> None:
        rules = self._rules
        if self._allowed is not None:
            self._cut_at = now
            if rollout > bound:  # a cut of unused memory costs nothing
                if now - self._grown_at < _SOON_S:
                    self._quiet_s = min(rules.quiet_most_s, 2 * self._quiet_s)
                self._lost_at = now
        self._allowed, self._growing = bound, False

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
        self._lately: deque[tuple[float, int]] = deque()  # values in falling order: the first is the highest

    def add(self, now: float, value: int) -> int:
        lately = self._lately
        while lately and lately[-1][1] <= value:
            lately.pop()
        lately.append((now, value))
        while lately[0][0] < now - self._window_s:
            lately.popleft()
        return lately[0][1]


class KvRises:
    """The largest rise of a value within `window_s`, in the last `remember_s` to twice that."""

    def __init__(self, window_s: float, remember_s: float) -> None:
        self._remember_s = remember_s
        self._negated = KvPeaks(window_s)  # its highest value is the negative of the window's lowest
        self._now = self._before = 0
        self._since = float("-inf")

    def add(self, now: float, value: int) -> int:
        lowest = -self._negated.add(now, -value)
        if now - self._since >= self._remember_s:
            # The first value is no rise, and rises older than two spans are forgotten.
            self._before = self._now if now - self._since < 2 * self._remember_s else 0
            self._now, self._since = 0, now
        self._now = max(self._now, value - lowest)
        return max(self._now, self._before)


#: Assumed wake-up times until they are measured. They are long, because a wake-up that does not pay delays rollouts
#: that could run elsewhere.
_HOST_S: Final = 5.0
_AWAY_S: Final = 60.0
#: The headroom covers a shortage that is shorter than this.
_PATIENCE_S: Final = 0.5
#: An idle time pays for a wake-up if it is this many times as long: then two thirds of it are used.
_PAYS: Final = 3.0
#: Where memory runs short so soon after a wake-up, the engine was what it lacked.
_TRIED_S: Final = 60.0
#: So long the engine stays down unless there is more memory than at that wake-up; twice as long each time, up to this.
_AGAIN_S: Final = 60.0
_AGAIN_MOST_S: Final = 3600.0


class DeviceMemory(Struct, frozen=True, kw_only=True):
    """The memory around one borrowing engine, in bytes."""

    short: int  # that serving lacks on the device, even without rollouts' KV cache
    spare: int  # free on the device beside what serving needs
    weights: int  # that the engine needs to be awake
    host_short: int = 0
    host_spare: int = 0
    device: bool = False  # whether the engine computes on a device with its own memory


def waking_pays(at: Residency, *, idle_s: float, wake_host_s: float, wake_away_s: float) -> bool:
    """Whether an engine whose weights are `at` a lower level should come up for so long; arguments as in
    `ResidencyPlan.decide`."""
    return idle_s >= _PAYS * _wake_s(at, wake_host_s, wake_away_s)


def _wake_s(at: Residency, wake_host_s: float, wake_away_s: float) -> float:
    return (wake_host_s or _HOST_S) if at is Residency.HOST else (wake_away_s or _AWAY_S)


class ResidencyPlan:
    """Decides for one borrower where its weights should stay: on the device, in host memory, or nowhere. The result is
    a wish. Workers on GPUs fulfil it by vLLM's sleep mode, from AWAKE; on CPU builds by giving up memory.

    Invariant: weights go down a level only while memory is short after all KV cache was given back. They come
    up only if there is room and the expected idle time pays for the wake-up. Both lower levels free the same memory on
    a device. Only the second one frees host memory too, and then a wake-up has to load the weights. An engine on a CPU
    has only host memory, so only the second level helps.

    An engine takes more of a device than its pool: its context, graphs, and what steps allocate. If a wake-up makes
    memory short, the next one needs what was free before this one and what was lacking then, for a while that doubles:
    so two engines that do not fit together do not sleep and wake in turn for ever.
    """

    def __init__(self) -> None:
        self._short_since: float | None = None
        self._down_at = self._woken_at = self._again_at = float("-inf")
        self._over = 0  # bytes that were free beyond its need when it was woken last
        self._beyond = 0  # bytes that it turned out to need besides, until `_again_at`
        self._again_s = 0.0  # the wait that this was; 0: the last wake-up was none too many

    def decide(
        self,
        now: float,
        *,
        at: Residency,
        memory: DeviceMemory,
        idle_s: float,
        wake_host_s: float = 0.0,
        wake_away_s: float = 0.0,
    ) -> Residency:
        """Where the weights should be. `at`: where they are; `idle_s`: how long borrowing will probably be possible;
        `wake_host_s` and `wake_away_s`: measured wake-up times, 0: unknown."""
        if memory.short > 0 or (at is Residency.HOST and memory.host_short > 0):
            if self._short_since is None:
                self._short_since = now
            if now - self._short_since >= _PATIENCE_S:
                if at is Residency.AWAKE and memory.device:
                    self._learn(now, memory)
                return self._down(now, at, memory)
            return at
        self._short_since = None
        if at is Residency.AWAKE:
            return at
        wake_s = _wake_s(at, wake_host_s, wake_away_s)
        needed = memory.weights + (self._beyond if now < self._again_at else 0)
        rested = now - self._down_at >= wake_s
        if memory.spare < needed or not rested or idle_s < _PAYS * wake_s:
            return at
        self._woken_at, self._over = now, memory.spare - memory.weights
        return Residency.AWAKE

    def _learn(self, now: float, memory: DeviceMemory) -> None:
        """Memory is short with the engine awake: whether that is its own doing. Once for each wake-up: it stays awake
        for some decisions more."""
        if self._woken_at == float("-inf"):
            return
        if now - self._woken_at > _TRIED_S:
            self._again_s, self._woken_at = 0.0, float("-inf")
            return
        self._beyond = self._over + memory.short
        self._again_s = min(_AGAIN_MOST_S, max(_AGAIN_S, 2 * self._again_s))
        self._again_at, self._woken_at = now + self._again_s, float("-inf")

    def _down(self, now: float, at: Residency, memory: DeviceMemory) -> Residency:
        """One level down, or two if the first one would not help."""
        if not memory.device:
            wanted = Residency.AWAY
        elif at is Residency.AWAKE:
            wanted = Residency.HOST if memory.host_spare >= memory.weights else Residency.AWAY
        else:
            wanted = Residency.AWAY if memory.host_short > 0 else at
        if wanted > at:
            self._down_at = now
        return max(at, wanted)
