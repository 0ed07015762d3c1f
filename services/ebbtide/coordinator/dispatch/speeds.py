"""Learns how fast each worker reads prompts and decodes; unknown workers count as typical ones of their kind."""

from bisect import bisect_left
from collections.abc import Generator, Iterable, Mapping, Sequence
from math import inf, log, nan, sqrt
from statistics import fmean, median
from typing import Final, NamedTuple

import numpy as np

from ebbtide.coordinator.forecasts.throughput import WorkerThroughput
from ebbtide.coordinator.rules.move_costs import COSTS
from ebbtide.coordinator.state.worker_reports import HeartbeatReport
from ebbtide.coordinator.state.worker_session import WorkerSession

#: Past reads weigh at most as many.
_MEMORY_READS: Final = 256.0
#: The assumed speed weighs as much as one read of so many tokens: about a turn of an agent.
_ASSUMED_TOKENS: Final = 512.0
#: An observation that is so many times what was expected counts as that: a pause that nobody reported, for example.
_SURPRISE: Final = 4.0
#: Reads before anything surprises.
_NOVICE_READS: Final = 16.0
#: Tokens/s: engines read neither slower nor faster.
_SLOWEST: Final = 1e1
_FASTEST: Final = 1e7


class PrefillSpeed:
    """Learns how fast a worker reads prompts: the ratio of tokens to seconds, in which older reads fade.

    A read also takes a time that does not depend on its length, such as the rest of the step under way. It is not told
    apart: lengths that hardly differ do not say how much it is. So a worker of short reads counts as somewhat slower
    than a long one would find it, and never as faster than it was seen.

    Invariant: the sums are those of the last few hundred reads, older ones fading, and of one read that was assumed,
    which does not fade. Both are positive. Lost with the process; a few dozen reads teach the speed again.

    One worker's speed. `assumed`: tokens/s, as long as nothing is known.
    """

    def __init__(self, assumed: float) -> None:
        self._assumed_s = _ASSUMED_TOKENS / min(_FASTEST, max(_SLOWEST, assumed))
        self._reads = self._tokens = self._seconds = 0.0

    @property
    def tokens_per_s(self) -> float:
        """Positive and finite."""
        return (_ASSUMED_TOKENS + self._tokens) / (self._assumed_s + self._seconds)

    def observe(self, reads: int, tokens: int, seconds: float) -> None:
        """Learn that so many prompts, of so many `tokens` not found in the cache, took so many `seconds` in all.

        Sums over a span do: they weigh as much as their tokens. Spans without a read are ignored.
        """
        if reads <= 0 or tokens <= 0 or not seconds > 0.0:
            return
        least_s, most_s = tokens / _FASTEST, tokens / _SLOWEST
        if self._reads >= _NOVICE_READS:
            expected_s = tokens / self.tokens_per_s
            least_s, most_s = max(least_s, expected_s / _SURPRISE), min(most_s, expected_s * _SURPRISE)
        fade = 1.0 - min(0.5, reads / _MEMORY_READS)
        self._reads = fade * self._reads + reads
        self._tokens = fade * self._tokens + tokens
        self._seconds = fade * self._seconds + min(most_s, max(least_s, seconds))


#: Workers, evenly picked, that stand for a larger fleet where a typical speed is asked for.
_SAMPLE: Final = 64


class PrefillSpeeds:
    """Learns from heartbeats how fast each worker reads prompts, and says it of those of which nothing is known yet.

    Invariant: `_speeds` has attached workers that have read, and `_beats` the last heartbeat of each that was learnt
    from. Lost with the process, and of a worker with its session: the fleet's typical speed counts until it has read
    again.
    """

    def __init__(self) -> None:
        self._speeds: dict[str, PrefillSpeed] = {}
        self._beats: dict[str, HeartbeatReport] = {}
        self.typical = 0.0  # tokens/s of a typical worker; 0.0: no worker's are known

    def learn(self, sessions: Iterable[WorkerSession]) -> None:
        """Learn from the heartbeats of all attached workers. A borrowed one reads when its host lets it: its times show
        no speed.
        """
        steady = {one.session_id: one for one in sessions if not one.borrowed}
        self._speeds = {name: speed for name, speed in self._speeds.items() if name in steady}
        self._beats = {name: self._heard(one) for name, one in steady.items()}
        known = list(self._speeds.values())[:: -(-len(self._speeds) // _SAMPLE) or 1]
        self.typical = median(speed.tokens_per_s for speed in known) if known else 0.0

    def rate(self, session: WorkerSession) -> float:
        """Tokens/s at which the worker reads; a typical one's if its own are not known; 0.0 if no worker's are."""
        speed = self._speeds.get(session.session_id)
        return speed.tokens_per_s if speed else self.typical

    def _heard(self, session: WorkerSession) -> HeartbeatReport:
        beat = session.beat
        last = self._beats.get(session.session_id, beat)
        if beat.prompt_reads > last.prompt_reads:
            assumed = self.typical or COSTS.prefill_tokens_per_s
            speed = self._speeds.setdefault(session.session_id, PrefillSpeed(assumed))
            tokens, seconds = beat.prompt_tokens - last.prompt_tokens, beat.prompt_s - last.prompt_s
            speed.observe(beat.prompt_reads - last.prompt_reads, tokens, seconds)
            session.learn_prefill(speed.tokens_per_s)
        return beat


#: A factor this near to one, as a logarithm, does not tell an engine from others of its kind.
_ALIKE: Final = 0.1
#: A factor beyond this is not believed: the worker was held up while it was observed.
_INCREDIBLE: Final = 100.0
#: A load counts as seen up to so much beyond what was seen.
_NEAR: Final = 1.1
#: Loads between which curves are interpolated: four to a doubling, up to some 16,000.
LOADS: Final = tuple(sorted({round(2.0 ** (step / 4)) for step in range(57)}))
#: The least share of the shortest time seen that a token is taken to need with fewer rollouts.
_UNSEEN: Final = 0.67
#: Times that curve and factors are fitted in turn.
_PASSES: Final = 12
_CLOSE: Final = 0.005
#: The least that a shorter context leaves of a token's time.
_LEAST: Final = 0.25
#: Engines, evenly picked, that stand for a larger kind.


class SeenEngine(NamedTuple):
    """What was learnt of an engine. `context`: mean tokens of its rollouts now; None: it has none, and counts as a
    usual one: what comes brings its context along.
    """

    speed: WorkerThroughput | None
    context: float | None


class SpeedCurve(NamedTuple):
    """Seconds that one token of each rollout takes, at each of the rising `loads`."""

    loads: Sequence[float]
    seconds: Sequence[float]

    def token_s(self, running: float) -> float:
        loads, seconds = self.loads, self.seconds
        if running >= loads[-1]:
            return seconds[-1] * running / loads[-1]
        at = bisect_left(loads, running)
        if at == 0:
            return seconds[0] * max(_UNSEEN, sqrt(sqrt(running / loads[0])))
        share = (running - loads[at - 1]) / (loads[at] - loads[at - 1])
        return seconds[at - 1] + share * (seconds[at] - seconds[at - 1])

    def rate(self, running: float, context: float = 0.0) -> float:  # noqa: ARG002 - the curve is that of its context
        """Tokens/s of each of `running` rollouts."""
        return 1.0 / self.token_s(running) if running > 0 else 0.0

    def scaled(self, factor: float) -> "SpeedCurve":
        return self if factor == 1.0 else SpeedCurve(self.loads, [factor * one for one in self.seconds])


class KindCurve:
    """Says how fast each engine decodes at any load, from what was seen of all of them.

    How load slows an engine down is learnt from all engines of one kind together, since one of them is seen at few
    loads: the median over those that were seen at a load. How much faster or slower an engine is than its kind is one
    factor, over all that was seen of it; a factor near one is noise, so like engines count as alike, and load alone
    decides among them. Little is promised that was not seen: below the fewest rollouts seen each is taken for somewhat
    faster than with those, or an empty engine would never be tried; above the most they share that throughput.

    How fast engines of one kind are at each load, at the mean context of all of them.
    """

    def __init__(self, curve: SpeedCurve, context: float, slope: float) -> None:
        """`slope`: how much longer a token takes for each token of context more, as a share."""
        self._curve, self._context, self._slope = curve, context, slope

    @classmethod
    def learnt(cls, engines: Sequence[SeenEngine]) -> "KindCurve | None":
        """From what was seen of these engines; None if nothing was."""
        seen = [one.speed for one in engines if one.speed is not None and one.speed.span[1] > 0.0]
        seen = seen[:: -(-len(seen) // _SAMPLE) or 1]
        if not seen:
            return None
        contexts = [one.context for one in engines if one.context is not None]
        context, slope = fmean(contexts or [0.0]), median(one.slope for one in seen)
        first = cls(_kind_curve(seen, context), context, slope)
        believed = [one for one in seen if 1.0 / _INCREDIBLE < first._slowness(one) < _INCREDIBLE]
        return first if len(believed) in {0, len(seen)} else cls(_kind_curve(believed, context), context, slope)

    def of(self, engine: SeenEngine) -> SpeedCurve:
        """The curve of one engine, at its own mean context."""
        factor = self._slowness(engine.speed) if engine.speed is not None else 1.0
        if abs(log(factor)) < _ALIKE or not 1.0 / _INCREDIBLE < factor < _INCREDIBLE:
            factor = 1.0
        further = engine.context - self._context if engine.context is not None else 0.0
        return self._curve.scaled(factor * max(_LEAST, 1.0 + self._slope * further))

    def _slowness(self, speed: WorkerThroughput) -> float:
        """How many times as long as its kind an engine takes for a token, over all that was seen of it."""
        points = speed.points()
        seen_s = sum(point.seen_s for point in points)
        if seen_s <= 0.0:
            return 1.0
        took = 0.0
        for point in points:
            took += point.seen_s / (speed.rate(point.running, self._context) * self._curve.token_s(point.running))
        return took / seen_s


def _kind_curve(seen: Sequence[WorkerThroughput], context: float) -> SpeedCurve:
    """The median over the engines that were seen at a load. Not all were seen at each, so each counts as if it were as
    fast as its kind: by a factor of its own, fitted in turn with the curve. No load is taken to be faster than a
    smaller one.
    """
    spans = [speed.span for speed in seen]
    fewest, most = min(low for low, _ in spans), max(high for _, high in spans)
    loads = [fewest, *(one for one in LOADS if fewest < one < most), *([most] if most > fewest else [])]
    taken = np.array(
        [
            [-log(speed.rate(load, context)) if low <= load * _NEAR and load <= high * _NEAR else nan for load in loads]
            for speed, (low, high) in zip(seen, spans, strict=True)
        ]
    )
    at = ~np.isnan(taken).all(axis=0)
    taken = taken[:, at]
    usual = np.nanpercentile(taken, 25, axis=0, method="lower")  # many may have been held up, few are too fast
    taken[np.abs(taken - usual) > log(_INCREDIBLE)] = nan
    factors = np.zeros((len(seen), 1))
    for _ in range(_PASSES if len(seen) > 1 else 1):
        curve = np.nanmedian(taken - factors, axis=0)
        off = taken - curve
        seen_at = np.maximum(1, (~np.isnan(off)).sum(axis=1, keepdims=True))
        before, factors = factors, np.nansum(off, axis=1, keepdims=True) / seen_at
        factors -= np.median(factors)
        if np.abs(factors - before).max() < _CLOSE:
            break
    seconds = np.maximum.accumulate(np.exp(curve))
    return SpeedCurve([load for load, was in zip(loads, at, strict=True) if was], seconds.tolist())


#: Speeds change little, and a fit looks at all that was seen of a sample of workers.
_EVERY_S: Final = 5.0
#: Kinds that are remembered. Workers name their devices freely, and the list must not grow without end.
_MOST: Final = 256


class FleetSpeeds:
    """Keeps how fast each worker decodes, learnt from all workers of its kind.

    Workers are of one kind if their engines name the same device and architecture; those that name no device are of one
    kind together. A worker of a kind of which nothing was seen counts as one of any kind.

    Invariant: `_kinds` has the kinds that were seen, at most `_MOST` of them; `_curves` those of attached workers, made
    since the last `fit`. Lost with the process, with the speeds.
    """

    def __init__(self) -> None:
        self._kinds: dict[tuple[str, str], KindCurve] = {}
        self._any: KindCurve | None = None  # of all workers, once `_asked_any`
        self._asked_any = False
        self._curves: dict[str, SpeedCurve] = {}
        self._seen: dict[str, SeenEngine] = {}
        self._fitted, self._outdated = -inf, False

    def note_first(self) -> None:
        """Note that a worker was seen for the first time: what is known of it counts from the next `fit` on."""
        self._outdated = True

    def fit(
        self,
        sessions: Iterable[WorkerSession],
        speeds: Mapping[str, WorkerThroughput],
        contexts: Mapping[str, float],
        now: float,
    ) -> Generator[None, None, bool]:
        """Fit anew every few seconds, or once a worker was seen for the first time; returns whether it did. It yields
        after each kind, so that others have their turn in between: until the end the former curves hold.

        `speeds`: by worker; `contexts`: mean tokens of the rollouts, by session. A kind whose workers left is
        remembered: a market that takes machines back gives like ones again.
        """
        if now - self._fitted < _EVERY_S and not self._outdated:
            return False
        self._outdated = False
        self._fitted = now
        kinds: dict[tuple[str, str], list[SeenEngine]] = {}
        seen: dict[str, SeenEngine] = {}
        for session in sessions:
            context = contexts.get(session.session_id) if session.attempts else None
            engine = seen[session.session_id] = SeenEngine(speeds.get(session.worker_id), context)
            kinds.setdefault(self._kind(session), []).append(engine)
        found = dict[tuple[str, str], KindCurve]()
        for kind, some in kinds.items():
            if (curve := KindCurve.learnt(some)) is not None:
                found[kind] = curve
                yield
        self._seen = seen
        self._curves.clear()
        for kind, curve in found.items():
            self._kinds.pop(kind, None)  # those seen last are forgotten last
            self._kinds[kind] = curve
        while len(self._kinds) > _MOST:
            del self._kinds[next(iter(self._kinds))]
        self._any, self._asked_any = None, False
        return True

    def curve(self, session: WorkerSession) -> SpeedCurve | None:
        """How fast the worker is at each load; None while nothing is known of any."""
        found = self._curves.get(session.session_id)
        if found is None and (kind := self._kinds.get(self._kind(session)) or self._anyone()) is not None:
            engine = self._seen.get(session.session_id) or SeenEngine(None, None)
            found = self._curves[session.session_id] = kind.of(engine)
        return found

    def _anyone(self) -> KindCurve | None:
        """A worker of any kind, as far as one was seen."""
        if not self._asked_any:
            self._asked_any = True
            self._any = KindCurve.learnt(list(self._seen.values())) or next(reversed(self._kinds.values()), None)
        return self._any

    def _kind(self, session: WorkerSession) -> tuple[str, str]:
        engine = session.hello.engine
        return engine.device, engine.architecture if engine.device else ""
