"""Estimates when the last of a step's rollouts ends, and how much sooner it would end after a move.

Nobody knows how long a response will be. The survival curve of the run's lengths says how likely each rollout still
runs once it has made so many tokens more; an engine's curve sums that up over its rollouts. All rollouts of an engine
share its speed alike, so the tokens that each makes follow from the loads on the way (processor sharing): an engine
speeds up as its rollouts end. With L(t) rollouts expected to run at time t over all engines, the step still runs then
with the chance 1 - exp(-L(t)), as if their number were Poisson's, and the expected end is the integral of that. Where
few rollouts are left this takes the end for sooner, and gains for smaller, than they are; where many engines should end
at the same moment it shares a gain among them, as an error of each estimate would.

A move takes a rollout's part from one engine's curve and adds it to another's, which begins later by the reading. So
the gain counts what all rollouts on both engines win and lose, and is zero where the step's end does not depend on it.
"""

from collections.abc import Mapping, Sequence
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt
from msgspec import Struct
from msgspec.structs import replace

from ebbtide.coordinator.forecasts.length_learner import LengthCurve

Floats = npt.NDArray[np.float64]

#: Tokens to come for which curves are computed: each a quarter more than the one before, up to some two millions.
_AHEAD: Final[Floats] = np.array([0.0, *(16.0 * 1.25**step for step in range(54))])
#: Moments for which the chance is computed that the step still runs.
_MOMENTS: Final = 96
#: They lie where it is in doubt: from when so many rollouts are expected to run, until so many are. A move may change
#: both moments by a part.
_SURE: Final = 8.0
_OVER: Final = 0.005
_SOONER: Final = 0.75
_LATER: Final = 1.1


class OpenRollout(Protocol):
    """`made`: tokens of the response so far; `budget`: that it may still make."""

    @property
    def made(self) -> int: ...
    @property
    def budget(self) -> int: ...


class EngineTerms(Struct, frozen=True, kw_only=True):
    """An engine's part in a step. `token_s`: seconds per token of each rollout, at each of the rising `loads`;
    `busy_s`: seconds that it reads before it decodes.
    """

    rollouts: Sequence[OpenRollout]
    loads: Floats
    token_s: Floats
    busy_s: float = 0.0


class _Curve(Struct, frozen=True):
    running: Floats  # rollouts that still run once each has made `_AHEAD` tokens more
    after_s: Floats  # until then


class StepFinish:
    """The expected end of a step, over engines by their keys."""

    def __init__(
        self,
        engines: Mapping[str, EngineTerms],
        lengths: LengthCurve,
        *,
        weights: Mapping[str, float] | None = None,
    ) -> None:
        """`weights`: how many engines of the fleet each one stands for; 1.0 where it is not named."""
        most = max((one.budget for terms in engines.values() for one in terms.rollouts), default=0)
        self._ahead = _AHEAD[: int(np.searchsorted(_AHEAD, most)) + 1]
        self._strides = np.diff(self._ahead)
        edges, shares = lengths.survival()
        self._edges, self._log_shares = np.log(edges), np.log(shares)
        self._engines, self._weights = dict(engines), weights or {}
        self._parts = {key: self._survival(terms.rollouts) for key, terms in engines.items()}
        self._curves = {key: self._curve(key, parts.sum(axis=0)) for key, parts in self._parts.items()}
        self._first = dict(self._curves)
        self._moments = np.linspace(*self._in_doubt(), _MOMENTS)
        self._over_time = {key: self._running(curve) for key, curve in self._curves.items()}
        self._total = self._expected(self._moments)
        self.end_s = self._end_s(self._total)

    def __contains__(self, key: str) -> bool:
        return key in self._engines

    def rollouts(self, key: str) -> Sequence[OpenRollout]:
        """Of an engine, after the moves so far."""
        return self._engines[key].rollouts

    def rest(self, key: str, at: int) -> float:
        """Expected tokens still to come of an engine's rollout."""
        part = self._parts[key][at]
        return float(np.dot(self._strides, 0.5 * (part[1:] + part[:-1])))

    def made(self, key: str, seconds: float) -> float:
        """Tokens that each rollout of an engine makes meanwhile, if it does not end, after the moves so far."""
        return float(np.interp(seconds, self._curves[key].after_s, self._ahead))

    def made_before(self, key: str, seconds: float) -> float:
        """The same, without the moves."""
        return float(np.interp(seconds, self._first[key].after_s, self._ahead))

    def ends_s(self, key: str, tokens: float) -> float:
        """Seconds until a rollout of an engine has made so many tokens more."""
        return float(np.interp(tokens, self._ahead, self._curves[key].after_s))

    def weight(self, key: str, at: int) -> float:
        """By how much a second's delay of an engine's rollout puts off the step's end, in seconds."""
        alone = np.interp(self._moments, self._curves[key].after_s, self._parts[key][at], right=0.0)
        return float(np.sum(np.exp(alone[:-1] - self._total[:-1]) * (alone[:-1] - alone[1:])))

    def moved(self, source: str, target: str, at: int, *, read_s: float) -> "MovedRollout":
        """What would come of moving the rollout at this place of the source's list, which the target has to read."""
        part = self._parts[source][at]
        left = self._curve(source, self._curves[source].running - part)
        joined = self._curve(target, self._curves[target].running + part, read_s)
        total = self._total - self._over_time[source] - self._over_time[target]
        total = np.maximum(0.0, total) + self._running(left) + self._running(joined)
        return MovedRollout(self.end_s - self._end_s(total), joined.after_s, self._ahead)

    def give(self, source: str, target: str, at: int, *, read_s: float) -> None:
        """Take the move as made."""
        rollouts, parts = self._engines[source].rollouts, self._parts[source]
        joined = np.vstack([self._parts[target], parts[at]])
        self._change(target, [*self._engines[target].rollouts, rollouts[at]], joined, read_s)
        self._change(source, [*rollouts[:at], *rollouts[at + 1 :]], np.delete(parts, at, axis=0), 0.0)
        self.end_s = self._end_s(self._total)

    def _change(self, key: str, rollouts: Sequence[OpenRollout], parts: Floats, read_s: float) -> None:
        terms = self._engines[key]
        self._engines[key] = replace(terms, rollouts=rollouts, busy_s=terms.busy_s + read_s)
        self._parts[key] = parts
        self._curves[key] = curve = self._curve(key, parts.sum(axis=0))
        over_time = self._running(curve)
        self._total = np.maximum(0.0, self._total - self._over_time[key]) + over_time
        self._over_time[key] = over_time

    def _in_doubt(self) -> tuple[float, float]:
        """From when until when it is in doubt whether the step still runs."""
        ends = [float(curve.after_s[-1]) for curve in self._curves.values() if curve.running[0] > 0.0]
        if not ends:
            return 0.0, 1.0
        moments = np.geomspace(1e-2, max(1.0, *ends), 4 * _MOMENTS)
        total = self._expected(moments)
        sure = moments[total >= _SURE]
        over = moments[total > _OVER]
        return _SOONER * float(sure[-1]) if len(sure) else 0.0, _LATER * float(over[-1]) if len(over) else 1.0

    def _expected(self, moments: Floats) -> Floats:
        """Rollouts of the fleet that still run at each moment."""
        total = np.zeros(len(moments))
        for key, curve in self._curves.items():
            total += self._weights.get(key, 1.0) * np.interp(moments, curve.after_s, curve.running, right=0.0)
        return total

    def _survival(self, rollouts: Sequence[OpenRollout]) -> Floats:
        """By rollout and tokens ahead: the chance that it still runs then."""
        made = np.array([max(1.0, one.made) for one in rollouts]).reshape(-1, 1)
        budget = np.array([one.budget for one in rollouts]).reshape(-1, 1)
        now = np.interp(np.log(made), self._edges, self._log_shares)
        then = np.interp(np.log(made + self._ahead), self._edges, self._log_shares)
        return np.where(self._ahead < budget, np.exp(then - now), 0.0)

    def _curve(self, key: str, running: Floats, read_s: float = 0.0) -> _Curve:
        terms = self._engines[key]
        between = 0.5 * (running[1:] + running[:-1])
        token_s = np.interp(between, terms.loads, terms.token_s)
        after_s = np.empty(len(running))
        after_s[0] = 0.0
        np.cumsum(self._strides * token_s, out=after_s[1:])
        return _Curve(running, after_s + (terms.busy_s + read_s))

    def _running(self, curve: _Curve) -> Floats:
        over_time: Floats = np.interp(self._moments, curve.after_s, curve.running, right=0.0)
        return over_time

    def _end_s(self, total: Floats) -> float:
        runs = -np.expm1(-total)
        step_s = self._moments[1] - self._moments[0]
        return float(self._moments[0] + step_s * (runs.sum() - 0.5 * (runs[0] + runs[-1])))


class MovedRollout:
    """What comes of a move: how much sooner the step ends, in seconds."""

    def __init__(self, gain_s: float, after_s: Floats, ahead: Floats) -> None:
        self.gain_s = gain_s
        self._after_s, self._ahead = after_s, ahead

    def ends_s(self, tokens: float) -> float:
        """Seconds until it would have made so many tokens more at the target."""
        return float(np.interp(tokens, self._ahead, self._after_s))
