"""Tells a fleet's simulation when a borrowed worker may step, and at which share of its speed, over days.

A pair is played in virtual time for few windows of the recorded traffic, once for each window and pace of arrivals, and
what it came to is kept as spells. A host's schedule is made of these. Left out by that:

- Within a spell the speed is constant: bursts and short standstills are in its share.
- A window begins as it ends: the guard has learnt from the same window before, and no backlog crosses windows.
- The rollouts beside the traffic are the pair's own, `costs.slots` at once. How many a worker really has, and whether
  the coordinator wants the host at all, does not change what its users meet.
- Hosts differ in where they are in the recording, not in their costs.
- While no request comes for a whole window, rollouts have the device to themselves, and no such window is played.
"""

from collections import OrderedDict
from collections.abc import Iterator
from math import floor, inf, log2
from random import Random
from typing import Final

from msgspec import Struct

from ebbtide.errors import InvalidRequest
from ebbtide.serving_guard.governor.budget_decider import LatencyTargets
from ebbtide.serving_guard.governor.traffic_rhythm import TrafficRhythm
from ebbtide.simulator.serving.grant_tape import GrantSpell, SpellRecorder
from ebbtide.simulator.serving.pair_costs import PairCosts
from ebbtide.simulator.serving.request_traffic import TrafficRequest
from ebbtide.simulator.serving.serving_alone import played_alone, resolved_targets
from ebbtide.simulator.serving.serving_pair import BEAT_S
from ebbtide.simulator.serving.serving_policies import OURS, UNGUARDED
from ebbtide.types.fleet import BorrowedState
from ebbtide.types.grants import Forecast

#: A worker's heartbeats say that it may not generate once it has stood still for so long (rollout_worker.guard_link).
_HELD_S: Final = 0.25
#: Paces of arrivals are rounded to this many steps of a doubling: 9 % apart, less than days differ.
_PACES: Final = 8
#: Spells of so many windows are kept. A window has some tens of them.
_KEPT: Final = 512
#: The speed without users is measured for so long.
_ALONE_S: Final = 30.0


class ServedTraffic(Struct, frozen=True, kw_only=True):
    """The requests that users send to one host. They repeat from the begin of the recording."""

    requests: tuple[TrafficRequest, ...]  # in order of arrival, in seconds from the begin of the recording
    seconds: float  # length of the recording
    #: (second of the day, factor on the speed of arrivals from then on); the first one is at 0.
    paces: tuple[tuple[float, float], ...] = ((0.0, 1.0),)
    day_s: float = 86_400.0
    shift_s: float = inf  # hosts begin up to so much later in the recording; inf: anywhere in it
    window_s: float = 120.0  # of the recording, played at once
    windows: int = 16  # of them, evenly over the recording, at most

    def checked(self) -> "ServedTraffic":
        """Return this traffic. Raises `InvalidRequest` naming the field."""
        times = [one.at for one in self.requests]
        if times != sorted(times) or (times and not 0 <= times[0] <= times[-1] < self.seconds < inf):
            raise InvalidRequest("must be in order, from 0 to before `seconds`", field="requests")
        if not 0 < self.window_s <= self.seconds or self.windows < 1:
            raise InvalidRequest("must be above 0 and within the recording, at least one", field="window_s, windows")
        begins = [at for at, _ in self.paces]
        if begins[:1] != [0.0] or begins != sorted(set(begins)) or not begins[-1] < self.day_s < inf:
            raise InvalidRequest("must begin at 0 and rise to before `day_s`", field="paces")
        if not all(0 <= pace <= 1e3 for _, pace in self.paces):
            raise InvalidRequest("must be from 0 to 1000 times the recorded speed", field="paces")
        return self

    def pace(self, at_s: float) -> float:
        """The factor on the speed of arrivals at this time."""
        second = at_s % self.day_s
        return next(pace for begin, pace in reversed(self.paces) if begin <= second)

    def window(self, number: int, pace: float, seconds: float) -> list[TrafficRequest]:
        """Requests of `seconds` of host time, at that pace, from the begin of that window on."""
        begin = number * self.seconds / self.count
        span = seconds * pace
        found: list[TrafficRequest] = []
        lap = 0
        while lap * self.seconds < begin + span:
            shift = lap * self.seconds - begin
            found += [
                TrafficRequest((one.at + shift) / pace, one.prompt, one.output)
                for one in self.requests
                if 0 <= one.at + shift < span
            ]
            lap += 1
        return found

    @property
    def count(self) -> int:
        """Windows that are played."""
        return max(1, min(self.windows, floor(self.seconds / self.window_s)))


class GrantTapes:
    """Plays each window once. Hosts of one pool share it. Invariant: at most `_KEPT` windows are kept, the last used
    ones; a window that is played again comes to the same."""

    def __init__(
        self,
        traffic: ServedTraffic,
        costs: PairCosts,
        slo: LatencyTargets,
        *,
        seed: int = 0,
    ) -> None:
        self.traffic, self._costs, self._slo = traffic.checked(), costs.checked(), slo
        self._seed = seed
        self._tapes: OrderedDict[tuple[int, int], list[GrantSpell]] = OrderedDict()
        self._targets: tuple[float, float] | None = None
        self._rate = 0.0
        self.played = 0  # windows

    def spells(self, window: int, pace: float) -> list[GrantSpell]:
        """The spells of one window, from 0 to `window_s`; empty if no request comes in it."""
        step = round(_PACES * log2(pace)) if pace > 0 else None
        if step is None:
            return []
        key = (window, step)
        if key not in self._tapes:
            self._tapes[key] = self._play(window, 2.0 ** (step / _PACES))
            while len(self._tapes) > _KEPT:
                self._tapes.popitem(last=False)
        self._tapes.move_to_end(key)
        return self._tapes[key]

    @property
    def targets(self) -> tuple[float, float]:
        """Targets of TTFT and TPOT in seconds. Where the SLO gives factors, they are on the latencies of serving alone
        in the first window with requests, at the recorded pace."""
        if self._targets is None:
            slo, traffic = self._slo, self.traffic
            if not (slo.ttft_s and slo.tpot_s):
                windows = (traffic.window(number, 1.0, traffic.window_s) for number in range(traffic.count))
                requests = next((found for found in windows if found), [])
                slo = resolved_targets(slo, played_alone(requests, self._costs, seed=self._seed).done)
            self._targets = slo.ttft_s, slo.tpot_s
        return self._targets

    @property
    def tokens_per_s(self) -> float:
        """The rollouts' speed without served requests, in the same pair."""
        if not self._rate:
            pair = UNGUARDED.play([], self._costs, LatencyTargets(), seed=self._seed)
            pair.rest(_ALONE_S)
            self._rate = max(1, pair.harvested) / _ALONE_S
        return self._rate

    def _play(self, window: int, pace: float) -> list[GrantSpell]:
        """Play the window twice: in the first lap the guard learns, the second one counts."""
        seconds = self.traffic.window_s
        requests = self.traffic.window(window, pace, seconds)
        if not requests:
            return []
        self.played += 1
        later = [TrafficRequest(one.at + seconds, one.prompt, one.output) for one in requests]
        ttft_s, tpot_s = self.targets
        pair = OURS.play([*requests, *later], self._costs, self._slo, seed=self._seed * 1_000_003 + window)
        recorder = SpellRecorder(
            seconds,
            2 * seconds,
            tokens_per_s=self.tokens_per_s,
            ttft_s=ttft_s,
            tpot_s=tpot_s,
            forecast=pair.guard.forecast,
        )
        pair.observer = recorder
        pair.run(2 * seconds)
        pair.rest(2 * seconds)
        recorder.late = pair.late(ttft_s, tpot_s)
        return recorder.spells()


class ServedHost:
    """One serving host of a pool. `seed` names the host: it decides where in the recording the host begins."""

    def __init__(
        self,
        traffic: ServedTraffic,
        costs: PairCosts,
        slo: LatencyTargets,
        seed: int,
        *,
        tapes: GrantTapes | None = None,
    ) -> None:
        """`tapes`: of the same traffic, costs and SLO, shared with other hosts; None: its own."""
        self._tapes = tapes or GrantTapes(traffic, costs, slo)
        shift_s = min(traffic.shift_s, traffic.seconds)
        random = Random(f"{seed} served host")
        self._offset = random.random() * shift_s
        self._phase = random.random() * traffic.window_s  # else hosts in the same window would move in step
        self._traffic = traffic

    def spells(self, from_s: float, until_s: float) -> Iterator[GrantSpell]:
        """The spells from `from_s` to `until_s`, without gaps. The first and the last one may be cut short."""
        window_s, idle = self._traffic.window_s, _IdleForecast()
        number = floor((from_s + self._phase) / window_s)
        begin = number * window_s - self._phase
        while begin < until_s:
            number += 1
            end = number * window_s - self._phase
            spells = self._tapes.spells(self._window(begin), self._traffic.pace(begin))
            if spells:
                idle.ended()
            else:
                spells = [GrantSpell(0.0, window_s, 1.0, 0, 0, idle.at(begin))]
            for one in spells:
                # Sums of times are not exact: a window ends where the next one begins.
                last = end if one is spells[-1] else begin + one.end_s
                if last > from_s and begin + one.begin_s < until_s:
                    yield one.moved(begin, last).between(from_s, until_s)
            begin = end

    def _window(self, at_s: float) -> int:
        traffic = self._traffic
        part = ((at_s + self._offset) % traffic.seconds) / traffic.seconds
        return min(traffic.count - 1, int(part * traffic.count))


def borrowed_state(spell: GrantSpell, now: float) -> BorrowedState:
    """What the worker's heartbeat says at `now`, in that spell. The forecast is the one of the spell's begin."""
    forecast = spell.forecast
    return BorrowedState(
        granted=spell.granted or now - spell.begin_s <= _HELD_S,
        share=min(1.0, forecast.share),
        spell_s=forecast.spell_s,
        disturbance=forecast.disturbance,
        asleep=spell.asleep,
    )


class _IdleForecast:
    """The forecast in windows without a request, of a guard that has not seen as long a silence before."""

    def __init__(self) -> None:
        self._rhythm: TrafficRhythm | None = None

    def ended(self) -> None:
        self._rhythm = None

    def at(self, now: float) -> Forecast:
        if self._rhythm is None:
            self._rhythm = TrafficRhythm(1.0 - LatencyTargets().percentile / 100.0)
            self._rhythm.turn(now, busy=False)
            self._rhythm.grant(now, granted=True)
        return self._rhythm.forecast(now + BEAT_S)  # at the first heartbeat, as in windows that are played
