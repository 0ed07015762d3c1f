"""Workers whose engine can be started anew for another architecture: which runs need that of whom, and when it pays.

Invariant: a run's architecture is known once some worker refused its weights for it, and not before: who fits a run
never needs to know. What could not be started is not tried again at that worker for `_REFUSED_S`. Lost with the
process, and learnt again by asking.
"""

from typing import Final

from ebbtide.coordinator.state import RunState, Session, State
from ebbtide.scheduling.changing import Prospect, settled, stay_s, worth

#: How long what a worker could not be started for is remembered.
_REFUSED_S: Final = 600.0
#: Of a worker whose speed is not known, tokens/s.
_RATE: Final = 500.0
#: Of a longer line, so many are looked at for what the rest will take.
_SAMPLE: Final = 64
#: How often a line is looked at.
_LOOK_S: Final = 0.5


class Changes:
    """`slice_s`: see `Settings`."""

    def __init__(self, state: State, *, slice_s: float) -> None:
        self._state, self._slice_s = state, slice_s
        self._waiting: dict[str, float] = {}  # runs with work and no worker, since when
        self._lines: dict[str, tuple[float, float]] = {}  # run -> until when it is known, tokens that wait

    def barred(self, session: Session, now: float) -> frozenset[str]:
        """Runs that the worker is not to be given; see `forbids`."""
        if session.changing in self._state.runs:
            return frozenset(self._state.runs.keys() - {session.changing})
        return frozenset(run.run_id for run in self._state.runs.values() if self.forbids(run, session, now))

    def needed(self, run: RunState, session: Session) -> bool:
        """Whether the run's weights fit the worker's engine only after a start for them."""
        known = bool(run.architecture) and not session.version_of(run.run_id)
        return known and session.hello.engine.architecture != run.architecture

    def forbids(self, run: RunState, session: Session, now: float) -> bool:
        """Whether the worker's engine would have to be started anew for the run, and it cannot be, was so just now, or
        would not gain by it. A run that nobody can serve is not kept from being refused: so it is found out."""
        if not self.needed(run, session) or session.changing == run.run_id:
            return False
        if may_change(run, session, now):
            return not self._pays(run, session, now)
        can = session.beat.restart_s > 0  # one that never can is asked anew from time to time, as ever
        return can and (run.fitted or self.served_by_somebody(run, now))

    def served_by_somebody(self, run: RunState, now: float) -> bool:
        """Whether an attached worker has the run's architecture, or can have it."""
        open_sessions = (one for one in self._state.sessions.values() if not one.draining)
        return any(not self.needed(run, one) or may_change(run, one, now) for one in open_sessions)

    def _pays(self, run: RunState, session: Session, now: float) -> bool:
        own = self._state.runs.get(session.run_id)
        waits = own is not None and bool(own.line) and session.version_of(own.run_id) > 0
        busy, change_s = waits or bool(session.attempts), session.beat.restart_s
        if not settled(now - session.restarted, change_s, busy=busy):
            return False
        servers = sum(one.version_of(run.run_id) > 0 for one in self._state.sessions.values())
        return worth(
            Prospect(
                change_s=change_s,
                stay_s=stay_s(self._slice_s, change_s, shared=busy),
                work_s=self._tokens_waiting(run, now) / _rate(session),
                servers=servers,
                waited_s=self._waited_s(run, servers, now),
                busy=busy,
            )
        )

    def _tokens_waiting(self, run: RunState, now: float) -> float:
        """Tokens that what stands in line will probably still take; looked at once in a while."""
        until, tokens = self._lines.get(run.run_id, (now, 0.0))
        if until <= now or (run.line and not tokens):
            some = [one for one, _ in zip(run.line, range(_SAMPLE), strict=False)]
            rest = sum(run.lengths.rest(one.made, one.budget or None) for one in some)
            tokens = rest * len(run.line) / len(some) if some else 0.0
            self._lines = {run_id: line for run_id, line in self._lines.items() if run_id in self._state.runs}
            self._lines[run.run_id] = now + _LOOK_S, tokens
        return tokens

    def _waited_s(self, run: RunState, servers: int, now: float) -> float:
        if servers or not run.line:
            self._waiting.pop(run.run_id, None)
            return 0.0
        self._waiting = {run_id: since for run_id, since in self._waiting.items() if run_id in self._state.runs}
        return now - self._waiting.setdefault(run.run_id, now)


def may_change(run: RunState, session: Session, now: float) -> bool:
    """Whether the worker's engine may be started anew for the run. One that was has no tokenizer, which stop strings
    need."""
    refused = session.refused.get(run.architecture, 0.0) > now
    return session.beat.restart_s > 0 and not refused and not run.spec.sampling.stop


def refused(session: Session, architecture: str, now: float) -> None:
    """The worker's engine could not be started for it."""
    session.refused[architecture] = now + _REFUSED_S


def _rate(session: Session) -> float:
    """Tokens/s that the worker has made while it worked."""
    beat = session.beat
    return beat.tokens_generated / beat.busy_s if beat.busy_s >= 1.0 and beat.tokens_generated else _RATE
