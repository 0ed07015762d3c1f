"""Records what a borrowed worker got of a device while a pair played: spells of a constant share of its speed.

Spells are seconds long, so that a fleet of such hosts needs few events. Standstills that are shorter than `LEAST_S` are
no spells of their own: they lower the share of the spell around them.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from ebbtide.scheduling.dispatch.reclaim_risk import SHORT_S
from ebbtide.simulator.serving.served_engine import ServedCall
from ebbtide.types.grants import Forecast

#: The coordinator moves nothing for a shorter reclaim, so a shorter standstill decides nothing.
LEAST_S: Final = SHORT_S
#: A spell in which the worker steps is at most this long: longer than most bursts, shorter than a rollout.
SPELL_S: Final = 10.0


class GrantSpell(Struct, frozen=True):
    """A time in which a borrowed worker makes tokens at a constant share of its speed."""

    begin_s: float
    end_s: float
    share: float  # of the speed without served requests; 0.0: it stands still
    requests: int  # served requests that ended in this time, or were late for good at its end
    attained: int  # of them, those within both targets of the SLO
    forecast: Forecast  # of the guard, at the begin
    asleep: bool = False  # the worker's weights are not on the device, at the begin

    @property
    def granted(self) -> bool:
        """Whether the worker may step."""
        return self.share > 0.0

    def between(self, begin_s: float, end_s: float) -> "GrantSpell":
        """The same with other times. Requests count only where the spell's end stays in it."""
        times = {"begin_s": max(begin_s, self.begin_s), "end_s": min(end_s, self.end_s)}
        return replace(self, **times) if self.end_s <= end_s else replace(self, **times, requests=0, attained=0)

    def moved(self, by_s: float, end_s: float) -> "GrantSpell":
        """The same so many seconds later, with that end."""
        return replace(self, begin_s=self.begin_s + by_s, end_s=end_s)


class SpellRecorder:
    """Observes a pair from `begin_s` to `end_s`. `tokens_per_s`: the rollouts' speed without served requests;
    `forecast(now)`: what the guard says then; `ttft_s` and `tpot_s`: the targets that requests attain or miss."""

    def __init__(
        self,
        begin_s: float,
        end_s: float,
        *,
        tokens_per_s: float,
        ttft_s: float,
        tpot_s: float,
        forecast: Callable[[float], Forecast],
    ) -> None:
        self._begin, self._end, self._rate = begin_s, end_s, tokens_per_s
        self._ttft, self._tpot, self._forecast = ttft_s, tpot_s, forecast
        self._steps: list[tuple[float, float, int]] = []  # (begin, end, tokens)
        self._served: list[tuple[float, bool]] = []  # (end, attained)
        self._beats: list[tuple[float, Forecast, bool]] = []
        self.late = 0  # requests that had missed a target at the end, and had not ended

    def stepped(self, began: float, now: float, made: int) -> None:
        """A rollout step ended and made so many tokens."""
        if self._begin <= began and now <= self._end:
            self._steps.append((began, now, made))

    def served(self, now: float, call: ServedCall) -> None:
        """A request got its last token."""
        if self._begin < now <= self._end:
            self._served.append((now, call.meets(self._ttft, self._tpot)))

    def beat(self, now: float, *, asleep: bool) -> None:
        """A second has passed. `asleep`: the worker's weights are not on the device."""
        if self._begin <= now <= self._end:
            self._beats.append((now, self._forecast(now), asleep))

    def spells(self) -> list[GrantSpell]:
        """The spells of the whole time, once the pair has played to its end. Their times count from its begin."""
        served, found, at = self._served, [], 0
        for begin, end, tokens in self._stretches():
            ended = bisect_right(served, (end, True))
            share = min(1.0, tokens / (self._rate * (end - begin)))
            attained = sum(good for _, good in served[at:ended])
            times = (begin - self._begin, end - self._begin)
            found.append(GrantSpell(*times, share, ended - at, attained, *self._beat_since(begin)))
            at = ended
        if found and self.late:
            found[-1] = replace(found[-1], requests=found[-1].requests + self.late)
        return found

    def _stretches(self) -> Iterator[tuple[float, float, int]]:
        """(begin, end, tokens) of each spell."""
        begin = last = self._begin
        tokens = 0
        for began, ended, made in [*self._steps, (self._end, self._end, 0)]:
            stood = began - last >= LEAST_S
            if last > begin and (stood or last - begin >= SPELL_S):
                yield begin, last, tokens
                begin, tokens = last, 0
            if stood:
                yield begin, began, 0
                begin = began
            tokens += made
            last = ended
        if last > begin:
            yield begin, last, tokens

    def _beat_since(self, begin: float) -> tuple[Forecast, bool]:
        """What the first heartbeat since then says; the last one if there is none since."""
        at = bisect_left(self._beats, begin, key=lambda beat: beat[0])
        return self._beats[min(at, len(self._beats) - 1)][1:] if self._beats else (Forecast(), False)
