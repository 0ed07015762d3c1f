"""Decides which serving hosts to borrow, and takes rollouts from workers whose host was reclaimed.

Invariant: each borrowed worker was told whether its host is wanted, and is told each change. All that is known of a
serving host is the forecast in its worker's heartbeats. Lost with the process: all hosts are borrowed again, and
workers are told so.
"""

from collections.abc import Sequence
from typing import Final

from ebbtide import telemetry
from ebbtide.coordinator.dispatcher.prefill_speeds import PrefillSpeeds
from ebbtide.coordinator.dispatcher.rebalancer import Rebalancer
from ebbtide.coordinator.fleet.release_requests import free
from ebbtide.coordinator.state.coordinator_state import CoordinatorState
from ebbtide.coordinator.state.run_events import RunEvents
from ebbtide.coordinator.state.run_state import RunState
from ebbtide.coordinator.state.worker_session import WorkerSession
from ebbtide.scheduling.dispatch.host_view import HostView, may_take
from ebbtide.scheduling.dispatch.reclaim_risk import leaving
from ebbtide.scheduling.lenders.lender_selection import Lender, LenderSelection
from ebbtide.types.fleet import WorkerState

log = telemetry.get_logger(__name__)
#: Hosts are judged so often: the verdict depends on means over minutes.
_JUDGE_EVERY_S: Final = 2.0
_RECLAIMED: Final = "its host took itself back"
_GIVEN_UP: Final = "its host is given up"


class BorrowedHosts:
    def __init__(
        self, state: CoordinatorState, moves: Rebalancer, prefills: PrefillSpeeds, run_events: RunEvents
    ) -> None:
        self._state, self._moves, self._prefills, self._run_events = state, moves, prefills, run_events
        self._borrowing = LenderSelection()
        self._next = float("-inf")

    def judge(self, now: float) -> None:
        """Decide every few seconds which hosts to borrow, tell the workers, and free those given up."""
        borrowed = [session for session in self._state.sessions.values() if session.borrowed and not session.draining]
        if not borrowed:
            return
        if now >= self._next:
            self._next = now + _JUDGE_EVERY_S
            self._borrowing.decide([self._lender(one) for one in borrowed], self._wanting(), now)
        for session in borrowed:
            self._tell(session)
            if session.given_up:
                free(session, session.attempts.values(), _GIVEN_UP, now)

    def release(self, run: RunState, hosts: Sequence[tuple[WorkerSession, HostView]], now: float) -> None:
        """Take from workers whose host was reclaimed for long what others could continue. `hosts`: the run's."""
        reclaimed = [one for one, _ in hosts if one.attempts and (lent := one.lent(now)) is not None and lent.ripe]
        if not reclaimed:
            return
        takers = [host for session, host in hosts if not host.shut and not session.gone]
        room = sum(max(0, host.slots - host.running) for host in takers if not host.held) - len(run.queue)
        for session in reclaimed:
            lent = session.lent(now)
            mine = [
                attempt
                for attempt in session.attempts.values()
                if attempt.run_id == run.run_id
                and attempt.attempt_id not in session.freed
                and any(may_take(attempt.rollout, host) for host in takers)
            ]
            if lent is None or not mine:
                continue
            lengths = [one.length for one in mine]
            freed = [mine[at] for at in leaving(lent, lengths, room=room, prefill=self._prefills.typical)]
            room -= len(freed)
            free(session, freed, _RECLAIMED, now)

    def _tell(self, session: WorkerSession) -> None:
        verdict = self._borrowing.verdict(session.worker_id)
        if session.wanted is verdict.wanted:
            return
        first = session.wanted is None
        session.tell_borrowed(wanted=verdict.wanted, reason=verdict.reason)
        if first and verdict.wanted:
            return
        words = "borrowed again" if verdict.wanted else f"given up: {verdict.reason}"
        text = f"worker {session.worker_id} is {words}"
        log.info("borrowing", worker_id=session.worker_id, wanted=verdict.wanted, reason=verdict.reason)
        self._run_events.of_worker(session, text, "borrowed" if verdict.wanted else "given_up")

    def _lender(self, session: WorkerSession) -> Lender:
        said = session.beat.borrowed
        speed, context = self._moves.speed(session)
        return Lender(
            worker_id=session.worker_id,
            slots=session.hello.slots,
            share=said.share if said else 0.0,
            disturbance=said.disturbance if said else 0.0,
            known=said is not None and (said.share > 0.0 or said.spell_s > 0.0),
            speed=speed,
            context=context,
        )

    def _wanting(self) -> int:
        """Rollouts, queued or at borrowed workers, that no other worker has a free slot for."""
        steady = [one for one in self._state.sessions.values() if not one.borrowed and not one.draining]
        free = sum(max(0, one.slots - len(one.attempts)) for one in steady if one.state is not WorkerState.SHUNNED)
        waiting = sum(len(run.queue) for run in self._state.runs.values())
        lent = sum(len(one.attempts) for one in self._state.sessions.values() if one.borrowed)
        return max(0, waiting + lent - free)
