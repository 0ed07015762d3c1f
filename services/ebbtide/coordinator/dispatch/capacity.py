"""Learns how long workers of each pool stay, and decides how many rollouts a worker's memory has room for."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Iterator
from itertools import accumulate
from math import exp, inf
from typing import Final, NamedTuple

from msgspec import Struct

from ebbtide.coordinator.state.coordinator_state import CoordinatorState
from ebbtide.coordinator.state.run_state import RunState
from ebbtide.coordinator.state.worker_reports import HeartbeatReport
from ebbtide.coordinator.state.worker_session import WorkerSession
from ebbtide.scheduling.long_tail.length_learner import LengthCurve
from ebbtide.types.fleet import WorkerKind

#: Losses and time of so long ago count a third.
_MEMORY_S: Final = 4 * 3600.0
#: What is assumed weighs as much as so long a time of one worker.
_ASSUMED_S: Final = 3600.0
#: Seconds between two losses of one usual spot worker. Recorded fleets of two clouds (`p3` and `g4dn` of Bamboo,
#: NSDI 2023) have a median life of an hour; calmer markets are more common.
_SPOT_SPELL_S: Final = 3 * 3600.0
#: Workers that stay longer than this on average count as never lost.
_STEADY_S: Final = 7 * 24 * 3600.0
#: Pools that are remembered. Workers name their sites freely, and the list must not grow without end.
_POOLS: Final = 256


class Pool(NamedTuple):
    kind: WorkerKind
    site: str


class LossRates:
    """Learns how often workers of each pool are lost: losses over the time for which its workers were there.

    A pool is all workers of one kind at one site. Spot markets change within hours, so older losses fade. A pool of
    which little was seen is taken for a usual one of its kind.

    Invariant: `_seen` has the faded losses and worker-seconds of at most `_POOLS` pools, both from the same time. Lost
    with the process; hours of a fleet teach them again.
    """

    def __init__(self) -> None:
        self._seen: dict[Pool, tuple[float, float]] = {}  # losses, worker-seconds

    @property
    def pools(self) -> Collection[Pool]:
        """Those that are remembered."""
        return self._seen.keys()

    def observe(self, pool: Pool, *, workers: int, lost: int, seconds: float) -> None:
        """Learn that of so many workers so many were lost within `seconds`. Call it for all `pools`: what was seen of
        one without workers fades, too.
        """
        losses, there_s = self._seen.get(pool, (0.0, 0.0))
        fade = exp(-seconds / _MEMORY_S)
        self._seen[pool] = (fade * losses + lost, fade * there_s + workers * seconds)
        if len(self._seen) > _POOLS:
            del self._seen[min(self._seen, key=lambda one: self._seen[one][1])]

    def spell_s(self, pool: Pool) -> float:
        """For how long a worker of the pool stays on average, in seconds; inf: it is practically never lost."""
        losses, there_s = self._seen.get(pool, (0.0, 0.0))
        assumed = _ASSUMED_S / _SPOT_SPELL_S if pool.kind is WorkerKind.SPOT else 0.0
        rate = (losses + assumed) / (there_s + _ASSUMED_S)
        return 1.0 / rate if rate * _STEADY_S > 1.0 else inf


#: Seconds without a token until the rollouts of a worker that was lost without notice are queued: some heartbeats.
FOUND_S: Final = 5.0
#: Rates change over hours.
_LOOK_EVERY_S: Final = 1.0
#: A worker that is away for longer is lost.
_AWAY_S: Final = 10.0
#: A look after a longer pause than this learns nothing: workers may have come and gone unseen.
_BLIND_S: Final = 30.0
#: Reasons to drain of workers that people asked: as the coordinator notes it, and as the worker says it then.
_ON_REQUEST: Final = frozenset({"asked to leave", "asked"})


class _Left(NamedTuple):
    pool: Pool
    at: float


class LossWatch:
    """Learns how often workers of each pool are lost, from those that are no longer attached.

    Invariant: `_there` has the workers of the last look, and `_away` those that left since and may come again under
    their name: a worker that attaches again soon was not lost. One that people asked to leave was not lost either.
    While no worker is attached, none is counted as lost: the link to all of them may be cut. Lost with the process: the
    rates are learnt again.
    """

    def __init__(self) -> None:
        self._rates = LossRates()
        self._there: dict[str, tuple[Pool, bool]] = {}  # whether it was asked to leave
        self._away: dict[str, _Left] = {}
        self._looked = -inf

    def look(self, sessions: Collection[WorkerSession], now: float) -> None:
        """Learn from the workers that are attached now."""
        seconds = now - self._looked
        if seconds < _LOOK_EVERY_S:
            return
        there = {one.worker_id: (_pool(one), one.reason in _ON_REQUEST) for one in sessions}
        if seconds <= _BLIND_S:
            self._learn(there, now, seconds)
        else:
            self._away.clear()
        self._there, self._looked = there, now

    def _learn(self, there: dict[str, tuple[Pool, bool]], now: float, seconds: float) -> None:
        left = {
            name: _Left(pool, now) for name, (pool, asked) in self._there.items() if name not in there and not asked
        }
        away = {name: one for name, one in (self._away | left).items() if name not in there}
        if not there:
            away = {name: one._replace(at=now) for name, one in away.items()}
        lost = Counter(one.pool for one in away.values() if now - one.at >= _AWAY_S)
        self._away = {name: one for name, one in away.items() if now - one.at < _AWAY_S}
        workers = Counter(pool for pool, _ in there.values())
        for pool in sorted({*workers, *lost, *self._rates.pools}):
            self._rates.observe(pool, workers=workers[pool], lost=lost[pool], seconds=seconds)

    def spell_s(self, session: WorkerSession) -> float:
        """For how long the worker will stay on average, in seconds; inf: it is practically never lost."""
        return self._rates.spell_s(_pool(session))


def _pool(session: WorkerSession) -> Pool:
    return Pool(session.hello.kind, session.hello.site)


#: Lengths of responses for which the peak is tabulated, each so many times the one before.
_GROWTH: Final = 1.25
_SHORTEST: Final = 32.0
_STEPS: Final = 52  # up to some million tokens
#: Share of the memory that is planned for: blocks are not filled to their ends, and sums of few rollouts vary.
_FILLED: Final = 0.95


class PeakTokens:
    """The most tokens that a rollout will probably hold at one moment, by the tokens that it has made.

    A table for prompts of one length, made once; `lengths` may change afterwards.
    """

    def __init__(self, lengths: LengthCurve, prompt: float) -> None:
        self._made = [0.0, *(_SHORTEST * _GROWTH**step for step in range(_STEPS))]
        alive = lengths.outlasting(self._made)
        held = [share * (prompt + made) for share, made in zip(alive, self._made, strict=True)]
        #: At the end of the table backwards: the most that is held from there on, for each that gets so far.
        most = list(accumulate(reversed(held), max))[::-1]
        self._peaks = [one / share if share > 0.0 else 0.0 for one, share in zip(most, alive, strict=True)]
        self._prompt = prompt

    def of(self, made: float) -> float:
        """Tokens of prompt and response; `made`: of the response, so far. Interpolated between the table's lengths."""
        at = bisect_right(self._made, made)
        if at == len(self._made):
            return self._prompt + made
        low, high = self._made[at - 1], self._made[at]
        share = (made - low) / (high - low)
        return max(self._prompt + made, self._peaks[at - 1] + share * (self._peaks[at] - self._peaks[at - 1]))


def memory_slots(peaks: PeakTokens, *, kv_tokens: int, most: int, running: int, made: float) -> int:
    """The slots that a worker offers: its `running` rollouts, and as many new ones as its memory has room for. If it
    has none, the running ones are not replaced while they are more than would fit if all were new.

    `kv_tokens`: that fit into its memory, 0 if it does not say; `most`: the slots that it is set to; `made`: tokens of
    the running rollouts' responses, on average. At least one: a rollout that fits nowhere else has to run alone.

    Each rollout is counted with the most tokens that it will probably hold at one moment: a response that grows needs
    more later, and one that may end soon needs that less probably. For rollouts that began together the sum is the peak
    of their memory. For rollouts of all ages it is somewhat more than they hold at a time (a tenth, if lengths are
    exponential).

    A worker with fewer slots than its memory holds rollouts makes fewer tokens than it could. With more, rollouts wait
    in its engine for memory while other workers have room, or are preempted and read again.
    """
    if not kv_tokens:
        return most
    memory, new = _FILLED * kv_tokens, max(1.0, peaks.of(0.0))
    room = memory - running * peaks.of(made)
    slots = running + int(room / new) if room >= 0.0 else min(running, int(memory / new))
    return max(1, min(most, slots))


#: A run's lengths change little within this.
_TABLE_S: Final = 2.0
#: Workers whose rollouts are summed up in one step.
_PART: Final = 100


class _Table(Struct):
    peaks: PeakTokens
    made: float  # when
    prompts: float = 0.0  # tokens of prompts, over the rollouts counted since then
    rollouts: int = 0

    @property
    def prompt(self) -> float:
        return self.prompts / max(1, self.rollouts)


class MemoryOffers:
    """Has each worker offer as many slots as its memory holds rollouts of its run, up to those that it is set to.

    Invariant: `_beats` has the last heartbeat of each worker that was looked at, and `_peaks` a table for each run.
    Lost with the process: a worker's own slots count until it is heard of again.
    """

    def __init__(self, state: CoordinatorState) -> None:
        self._state = state
        self._beats: dict[str, HeartbeatReport] = {}  # by session
        self._peaks: dict[str, _Table] = {}  # by run

    def update(self, now: float) -> Iterator[None]:
        """Look at the workers that were heard of since the last call, some in each step: others have their turn."""
        sessions = [one for one in self._state.sessions.values() if one.hello.engine.kv_tokens]
        self._beats = {one.session_id: beat for one in sessions if (beat := self._beats.get(one.session_id))}
        self._peaks = {run_id: table for run_id, table in self._peaks.items() if run_id in self._state.runs}
        fresh = [one for one in sessions if self._beats.get(one.session_id) is not one.beat]
        for at, session in enumerate(fresh, 1):
            self._beats[session.session_id] = session.beat
            if (run := self._state.runs.get(session.run_id)) is not None:
                self._offer(session, run, now)
            if not at % _PART:
                yield

    def _offer(self, session: WorkerSession, run: RunState, now: float) -> None:
        attempts = session.attempts.values()
        made = sum(one.stored for one in attempts)
        table = self._table(run, now)
        table.prompts += sum(one.length for one in attempts) - made
        table.rollouts += len(attempts)
        running = len(attempts)
        slots = memory_slots(
            table.peaks,
            kv_tokens=session.hello.engine.kv_tokens,
            # More than wait there already could not start, and would be of no use elsewhere.
            most=min(session.hello.slots, max(1, running)) if session.beat.unadmitted else session.hello.slots,
            running=running,
            made=made / max(1, running),
        )
        session.offer(slots)

    def _table(self, run: RunState, now: float) -> _Table:
        known = self._peaks.get(run.run_id)
        if known is None:
            waiting = next(iter(run.queue), None)
            prompt = float(waiting.length - waiting.made) if waiting is not None else 0.0
            known = self._peaks[run.run_id] = _Table(PeakTokens(run.tail.lengths, prompt), now)
        elif now - known.made >= _TABLE_S and known.rollouts:
            known = self._peaks[run.run_id] = _Table(PeakTokens(run.tail.lengths, known.prompt), now)
        return known
