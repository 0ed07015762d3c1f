"""Defines what a dispatcher's round has its caller do, because it needs the store."""

import math
from collections.abc import Sequence
from typing import Final, NamedTuple, TypeAlias

from ebbtide.coordinator.dispatcher.host_views import HostViews
from ebbtide.coordinator.dispatcher.rebalancer import borrowable
from ebbtide.coordinator.state.coordinator_state import CoordinatorState
from ebbtide.coordinator.state.run_state import RunState
from ebbtide.coordinator.state.worker_session import WorkerSession
from ebbtide.scheduling.dispatch.host_view import HostView
from ebbtide.scheduling.dispatch.kept_slots import kept_slots
from ebbtide.scheduling.dispatch.placement import Placement, place
from ebbtide.scheduling.dispatch.rollout_queue import QueuedRollout
from ebbtide.scheduling.dispatch.start_pacing import StartPacing

#: Rollouts placed by one store call: their prompts and partials come back in its reply.
_PLACE_AT_ONCE: Final = 128


class SlotFill:
    """Gives a run's queued rollouts to its workers' free slots, batch by batch.

    While `due`, the caller takes the run's lock, calls `place`, and starts what that returns; nothing ends the deed.
    Then it tells by `note_turn` how long others had their turn.
    """

    def __init__(
        self,
        run: RunState,
        state: CoordinatorState,
        hosts: HostViews,
        starts: StartPacing,
        now: float,
        *,
        interactive_slots: int = 0,
    ) -> None:
        """`interactive_slots`: see the settings."""
        self.run: Final = run
        self._state, self._hosts, self._starts = state, hosts, starts
        self._now = now
        self._interactive_slots = interactive_slots
        self.kept = 0  # slots that the last batch left free for interactive rollouts
        self.slowed = False  # the last batch made the caller hold starts

    @property
    def held(self) -> bool:
        """Whether no rollout may start now: the caller is behind with what workers send."""
        return self._starts.held_s(self._now) > 0.0

    def due(self, now: float) -> bool:
        """Whether there may be something to place."""
        self._now, run = now, self.run
        return bool(run.queue) and not run.stale and self._state.has_room(run.run_id) and not self.held

    def place(self, now: float) -> list[Placement]:
        """The next batch; empty if nothing fits. Call with the run's lock held: workers may leave while it is awaited.
        A placement's `worker_id` is a session's id.
        """
        self._now, run = now, self.run
        served = self._hosts.of(run, now)
        hosts = [host for _, host in served]
        if all(host.running >= host.slots for host in hosts):
            return []
        return place(
            run.queue,
            hosts + self._hosts.coming(run, now),
            run.prefixes,
            at_most=_PLACE_AT_ONCE,
            rest=self._rest,
            borrowable=borrowable(run),
            batch_slots=self._batch_slots(served),
            now=now,
            siblings=run.siblings,
        )

    def _rest(self, one: QueuedRollout) -> float:
        """Tokens that a rollout will probably still make: its budget or the run's context ends it."""
        rest = self.run.tail.rest(one, one.made, one.budget or None)
        return min(rest, max(0, context - one.length)) if (context := self.run.context) else rest

    def _batch_slots(self, served: Sequence[tuple[WorkerSession, HostView]]) -> float:
        """Most placements of batch rollouts: the others' free slots are kept."""
        running = sum(session.interactive for session, _ in served)
        total = sum(host.slots for _, host in served)
        asked_s = self._now - self.run.asked_at
        self.kept = kept_slots(total, running, most=self._interactive_slots, asked_s=asked_s)
        if not self.kept:
            return math.inf
        return sum(max(0, host.slots - host.running) for _, host in served if not host.shut) - self.kept

    def note_turn(self, turn_s: float, now: float) -> None:
        """Note how long others had their turn after a batch."""
        self._now = now
        self.slowed = self._starts.note_turn(turn_s, now)


class DeadLetters(NamedTuple):
    """Rollouts to end as dead letters, if they are still queued: (rollout, why)."""

    run: RunState
    letters: Sequence[tuple[str, str]]


class RunFailure(NamedTuple):
    """A run to end as failed."""

    run: RunState
    message: str


#: None: others should have their turn.
Deed: TypeAlias = SlotFill | DeadLetters | RunFailure | None
