"""Generates a worker's attempts with its engine, and has what they make stored.

Invariant: the engine holds a sequence for each attempt of `_attempts` that has not ended, under its rollout's id. A
token counts as stored once it was flushed. What was not flushed when the machine is lost is generated again.
"""

from collections.abc import Callable, Iterable, Sequence
from math import ceil, inf
from statistics import fmean
from typing import Final, NamedTuple, Protocol

from ebbtide.coordinator.state.running_attempt import RunningAttempt
from ebbtide.coordinator.state.worker_session import WorkerSession
from ebbtide.rollout_worker.generation.outbox import JITTER
from ebbtide.simulator.engines.simulated_engine import EngineEventKind, SimulatedEngine
from ebbtide.simulator.outcome import TokenCounts
from ebbtide.simulator.world.virtual_time import Alarm, VirtualTime
from ebbtide.types.fleet import AttemptRef

#: As in `outbox.py`: a finish, and an attempt's first token, wait so long for others to share the message.
_URGENT_S: Final = 0.02


class Response(NamedTuple):
    """What a rollout's model says, however often it is interrupted. Lengths in tokens."""

    prompt: int
    length: int
    prefix: str  # names the prompt, which the samples of a group share
    after: tuple[str, ...]  # the rollouts of the turns before, the last one first
    carried: int = 0  # of what it has so far, tokens whose keys and values come along
    copy_s: float = 0.0  # seconds until these are there


class AttemptStore(Protocol):
    """Where attempts' tokens go."""

    def response(self, rollout_id: str) -> Response: ...

    def stored(self, session: WorkerSession, attempts: Sequence[RunningAttempt], ends: Sequence[int]) -> None:
        """Store the tokens of attempts of a session, until `ends` of each response."""
        ...

    def finished(self, attempt: RunningAttempt) -> None: ...


class FlushTerms(NamedTuple):
    """A worker's flush window: so long, or so many tokens of a rollout."""

    interval_s: float
    tokens: int


class AttemptHost:
    def __init__(
        self,
        engine: SimulatedEngine,
        time: VirtualTime,
        store: AttemptStore,
        tokens: TokenCounts,
        flush: FlushTerms,
        changed: Callable[[], None],
        phase: float = 0.0,
    ) -> None:
        """`changed` is called when the engine may have begun or ceased to work. `phase`: share of a flush interval that
        had passed when the machine came, so that losses at whole seconds do not meet fresh flushes.
        """
        self.engine, self._time, self._store, self._tokens = engine, time, store, tokens
        self._flush_terms, self._changed = flush, changed
        self._interval_s = flush.interval_s
        self._began, self._reported = time.now - phase * flush.interval_s, time.now
        self.session: WorkerSession | None = None  # None: nothing can be reported
        self._attempts: dict[str, RunningAttempt] = {}  # by rollout
        self._lengths: dict[str, int] = {}  # of the same ones: tokens of the whole response
        self._first: dict[str, None] = {}  # rollouts whose first token is to be reported
        self._ended: dict[str, int] = {}  # with the tokens of the whole response
        self._holds: set[str] = set()
        self.made_at = time.now  # when the engine made its last token, as far as was looked
        self._engine_due = Alarm(time, self.look)
        self._urgent_due = Alarm(time, self._report)

    @property
    def works(self) -> bool:
        """Whether the engine has work and may step."""
        return bool(self.engine.running or self.engine.waiting) and not self._holds

    @property
    def holds(self) -> frozenset[str]:
        return frozenset(self._holds)

    @property
    def held(self) -> list[AttemptRef]:
        return [one.ref for one in self._attempts.values()]

    def pace(self, least_s: float) -> None:
        """Flush no more often than this."""
        self._interval_s = max(self._flush_terms.interval_s, least_s)

    def take(self, attempts: Iterable[RunningAttempt]) -> None:
        """Begin attempts that the session's coordinator assigned."""
        now = self._time.now
        for one in attempts:
            if one.session is not self.session or one.session is None:
                continue  # taken back while the message was on its way
            rollout_id = one.rollout.rollout_id
            self._attempts[rollout_id] = one
            prompt, length, prefix, after, carried, copy_s = self._store.response(rollout_id)
            self._lengths[rollout_id] = length
            self.engine.admit(
                rollout_id,
                prompt=prompt,
                made=one.start,
                length=length,
                now=now,
                prefix=prefix,
                after=after,
                cached=carried,
                copy_s=copy_s,
                text=one.rollout.episode_id,
            )
            self._tokens.moved += one.start
        self.look()

    def progress(self) -> dict[str, int]:
        """Tokens of the responses that its engine makes now, by rollout."""
        self.look()
        made, ended = self.engine.made, self._ended
        return {key: made(key) for key in self._attempts if key not in ended}

    def hand_back(self, refs: Iterable[AttemptRef]) -> tuple[AttemptRef, ...]:
        """Stop attempts, and store all that they made. Returns those that had not ended."""
        self.look()
        back = []
        for ref in refs:
            attempt = self._stop(ref)
            if attempt is not None and attempt.session is not None:
                made = self.engine.remove(ref.rollout_id, self._time.now)
                self._store.stored(attempt.session, [attempt], [made])
                back.append(ref)
        self.look()
        return tuple(back)

    def drop(self, refs: Iterable[AttemptRef]) -> None:
        """Stop attempts that are over, or another worker's."""
        self.look()
        for ref in refs:
            attempt = self._stop(ref)
            if attempt is not None:
                self._lose(attempt, self.engine.remove(ref.rollout_id, self._time.now))
        self.look()

    def abandon(self, refs: Iterable[AttemptRef]) -> None:
        """Stop attempts whose rollouts nobody wants any more: what was not stored is dropped, and not made again."""
        self.look()
        for ref in refs:
            attempt = self._stop(ref)
            if attempt is not None:
                made = self.engine.remove(ref.rollout_id, self._time.now)
                self._tokens.dropped += max(0, made - attempt.stored)
        self.look()

    def _stop(self, ref: AttemptRef) -> RunningAttempt | None:
        """Forget an attempt that has not ended. The engine still has it."""
        attempt = self._attempts.get(ref.rollout_id)
        if attempt is None or attempt.attempt_id != ref.attempt_id or ref.rollout_id in self._ended:
            return None
        self._first.pop(ref.rollout_id, None)
        del self._lengths[ref.rollout_id]
        return self._attempts.pop(ref.rollout_id)

    def end(self) -> None:
        """Lose the machine, with all that was not flushed."""
        self.look()
        made = self.engine.clear(self._time.now)
        lost = [(attempt, tokens) for key, tokens in made if (attempt := self._attempts.get(key))]
        self._flush_late([one for one in lost if one[0].session is self.session])
        for attempt, tokens in lost:
            self._lose(attempt, tokens)
        for rollout_id, length in self._ended.items():
            self._lose(self._attempts[rollout_id], length)
        self._ended.clear()
        self._attempts.clear()
        self._lengths.clear()
        self._engine_due.set(inf)
        self._urgent_due.set(inf)

    def _flush_late(self, lost: Sequence[tuple[RunningAttempt, int]]) -> None:
        """Store what a lost machine had flushed since its last report.

        All attempts are flushed at once, after the interval or when one has half a window of tokens, as `Outbox` does.
        """
        session, now = self.session, self._time.now
        fresh = [(attempt, made, made - attempt.stored) for attempt, made in lost if made > attempt.stored]
        if session is None or not fresh:
            return
        passed_s = max(self._interval_s, now - self._reported)
        fastest = max(tokens for *_, tokens in fresh) / passed_s
        cycle_s = min(fmean(JITTER) * self._interval_s, ceil(self._flush_terms.tokens / 2) / fastest)
        share = (now - self._began) % cycle_s / passed_s
        ends = [made - min(tokens, ceil(tokens * share)) for _, made, tokens in fresh]
        self._store.stored(session, [attempt for attempt, *_ in fresh], ends)

    def _lose(self, attempt: RunningAttempt, made: int) -> None:
        lost = max(0, made - attempt.stored)
        self._tokens.lost += lost
        self._tokens.twice += lost

    # Its engine.

    def hold(self, reason: str) -> None:
        """Keep the engine from stepping until `go_on` is called with each reason."""
        if not self._holds:
            self.look()
            self.engine.hold(self._time.now)
        self._holds.add(reason)
        self.look()

    def go_on(self, reason: str) -> None:
        if reason not in self._holds:
            return
        self._holds.discard(reason)
        if not self._holds:
            self.engine.go_on(self._time.now)
            self.made_at = self._time.now
        self.look()

    def look(self) -> None:
        """Bring the engine to the present, take in what happened in it, and plan when to look again."""
        now, engine, before = self._time.now, self.engine, self.engine.generated
        for event in engine.advance(now):
            if event.kind is EngineEventKind.STARTED:
                self._first[event.key] = None
            elif event.kind is EngineEventKind.FINISHED:
                self._ended[event.key] = self._lengths[event.key]
        if (self._first or self._ended) and self._urgent_due.due == inf:
            self._urgent_due.set(now + _URGENT_S)
        if engine.generated > before:
            self.made_at = now
        self._engine_due.set(engine.next_event())
        self._changed()

    # What is stored.

    def report(self) -> None:
        """Tell the coordinator how far all attempts have come. A live worker does so with every flush; here once per
        heartbeat is enough, and what was flushed since counts when the machine is lost.
        """
        self.look()
        session = self.session
        if session is None or session.gone or "frozen" in self._holds:
            return
        self._report()
        self._reported = self._time.now
        running = [one for one in self._attempts.values() if one.started and one.session is session]
        if running:
            made = self.engine.made
            self._store.stored(session, running, [made(one.rollout.rollout_id) for one in running])

    def _report(self) -> None:
        """Report first tokens and finishes."""
        session = self.session
        if session is None or session.gone or "frozen" in self._holds:
            return
        first, self._first = self._first, {}
        ended, self._ended = self._ended, {}
        begun = [one for key in first if key not in ended and (one := self._attempts.get(key))]
        begun = [one for one in begun if one.session is session]
        if begun:
            self._store.stored(session, begun, [self.engine.made(one.rollout.rollout_id) for one in begun])
        for rollout_id, length in ended.items():
            attempt = self._attempts.pop(rollout_id)
            del self._lengths[rollout_id]
            if attempt.session is session:
                self._store.finished(attempt)
            else:  # another worker has it meanwhile
                self._lose(attempt, length)
