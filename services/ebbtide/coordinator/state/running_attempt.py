"""Models an attempt: one worker's try at a rollout.

Invariant: an attempt in `RunState.running` has a session or is orphaned, never both. Its session lists it in
`attempts`, and in `pending` until its first token arrives. An orphan wakes the loop that re-queues it.
"""

from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec
from msgspec import Struct

from ebbtide.coordinator.rules.rollout_queue import QueuedRollout
from ebbtide.types.fleet import AttemptRef, EndReason

if TYPE_CHECKING:  # each refers to the others
    from ebbtide.coordinator.state.run_state import RunState
    from ebbtide.coordinator.state.worker_session import WorkerSession


class OrphanedAttempt(Struct, frozen=True):
    """An attempt without a worker."""

    due: float  # when it is re-queued, unless its worker comes back
    why: EndReason


class AttemptForecast(NamedTuple):
    """Tokens that an attempt has still to come, as its worker is told; 0: not known."""

    expected_tokens: int = 0
    longest_tokens: int = 0
    stored: int = 0  # that the forecast knew of

    def differs(self, told: "AttemptForecast") -> bool:
        """Whether it is news to one who was told `told`, and has counted the tokens since then."""
        before = max(1, told.stored + told.expected_tokens)
        now = max(1, self.stored + self.expected_tokens)
        return not before / _CHANGED <= now <= before * _CHANGED


#: A length is told anew once it has changed by more than this factor.
_CHANGED: Final = 1.2


class RunningAttempt(Struct, kw_only=True, eq=False):
    """One running rollout."""

    run: "RunState"
    attempt_id: str
    rollout: QueuedRollout  # as it was queued
    start: int  # its first token
    max_tokens: int
    run_id: str = ""  # set from `run`
    leaving: bool = False  # the store was asked to end it: its worker can no longer continue it
    stored: int = 0  # tokens of the rollout that the store has, as last acknowledged
    started: bool = False  # a token of this attempt has arrived
    number: int = 0  # of the rollout's attempts; 0: not known
    given: float = 0.0  # when a worker got it
    lost: int = 0  # tokens lost with its worker, at most
    cached: int = 0  # tokens of the rollout that its worker had when it got it
    target: str = ""  # the worker that the coordinator moves it to
    session: "WorkerSession | None" = None
    orphaned: OrphanedAttempt | None = None
    group_id: str = ""  # whose tokens serve drafts of it; else empty
    told: AttemptForecast = AttemptForecast()  # by its worker
    most: int = 0  # records that the store takes of it: of scores there are more than `max_tokens`; set from `rollout`

    def __post_init__(self) -> None:
        self.run_id = self.run.run_id
        self.most = self.rollout.score_records or self.max_tokens
        self.stored = max(self.stored, self.start)

    @property
    def ref(self) -> AttemptRef:
        return AttemptRef(self.run_id, self.rollout.rollout_id, self.attempt_id)

    @property
    def made(self) -> int:
        """Tokens of the response that the store has."""
        return self.stored

    @property
    def length(self) -> int:
        """Tokens of prompt and response."""
        return self.rollout.length + self.stored - self.start

    def foresee(self) -> AttemptForecast:
        """What its worker is told at its assignment."""
        self.told = self._forecast()
        return self.told

    def news(self) -> AttemptForecast | None:
        """What its worker is to be told now; None if it knows as much. It counts as told."""
        found = self._forecast()
        if not found.longest_tokens or not found.differs(self.told):
            return None
        self.told = found
        return found

    def _forecast(self) -> AttemptForecast:
        rollout, lengths = self.rollout, self.run.lengths
        quantiles = lengths.quantiles(rollout) if lengths.forecasts.known else None
        if quantiles is None:
            return AttemptForecast()
        most = max(1, self.max_tokens - self.stored)
        expected, longest = (min(most, round(one)) for one in (quantiles.expected, quantiles.longest))
        return AttemptForecast(expected, longest, self.stored)

    def begin(self, now: float) -> None:
        """Note that its first tokens arrived, stored or not. Its worker may take another rollout."""
        self.started = True
        if (session := self.session) is not None:
            session.begun(self)
            if self.number > 1:
                self.run.note_resumed(now - self.rollout.since)
        if self.run.queue:
            self.run.wakeups.decide()

    def believe_stored(self, tokens: int) -> None:
        """Take the store's word for how many of the rollout's tokens it has."""
        self.stored = tokens

    def note_cached(self, tokens: int) -> None:
        self.cached = tokens

    def assign(self, session: "WorkerSession") -> None:
        self.unassign()
        orphaned, self.session, self.orphaned = self.orphaned, session, None
        session.hold(self)
        if orphaned is not None:
            self.run.note_worker(self)

    def unassign(self) -> None:
        """Remove it from its session, if it has one."""
        session, self.session = self.session, None
        if session is not None:
            session.let_go(self)

    def orphan(self, orphaned: OrphanedAttempt, *, lost: int | None = None) -> None:
        """Take it from its worker. `lost`: tokens lost with that, at most."""
        self.unassign()
        self.orphaned = orphaned
        self.lost = self.lost if lost is None else lost
        self.run.note_worker(self)

    def set_due(self, due: float) -> None:
        """Re-queue the orphan at another time."""
        if self.orphaned is not None:
            sooner = due < self.orphaned.due
            self.orphaned = msgspec.structs.replace(self.orphaned, due=due)
            if sooner:
                self.run.wakeups.reap()

    def leave(self) -> None:
        """Note that the store is asked to end it: no worker may continue it."""
        self.leaving = True

    def move_to(self, worker_id: str) -> None:
        """Note that its worker is asked for it on behalf of another."""
        self.target = worker_id

    def give_up_move(self) -> None:
        self.target = ""


class UnconfirmedAttempt(Struct, frozen=True):
    """An attempt whose rollout the store forgot. Its worker continues, since the rollout may be submitted again."""

    attempt: RunningAttempt
    due: float  # when its worker must stop
    newer: bool = False  # known to be newer than any attempt in the store


class FinishedAttempt(NamedTuple):
    attempt: RunningAttempt
    session: "WorkerSession"
    at: float  # when the store had acknowledged it (seconds, monotonic)
