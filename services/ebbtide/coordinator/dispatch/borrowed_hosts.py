"""Decides which serving hosts to borrow, and takes rollouts from workers whose host was reclaimed.

A host's gain is compared with its cost. Both are shares, so that nothing has to be configured. The gain is the host's
marginal tokens/s, as a share of what it makes with full slots and all of its time: rollouts that no other worker has a
slot for go to the least disturbed hosts first, at the learnt speed, in the share of the time that the guard forecasts.
The cost is the share of the SLO's error budget used by requests beside rollouts. A host is given up while it costs more
than it gains, after PEARL's lesson (arXiv 2609.35158) that more machines are not always more speed; and at once when
its error budget is used up.

Invariant: each borrowed worker was told whether its host is wanted, and is told each change. All that is known of a
serving host is the forecast in its worker's heartbeats. Lost with the process: all hosts are borrowed and judged again,
and workers are told so.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

from msgspec import Struct

from ebbtide import telemetry
from ebbtide.coordinator.dispatch.rebalancer import Rebalancer, free
from ebbtide.coordinator.dispatch.speeds import PrefillSpeeds
from ebbtide.coordinator.forecasts.throughput import WorkerThroughput
from ebbtide.coordinator.rules.move_costs import leaving
from ebbtide.coordinator.rules.worker_view import WorkerView, may_take
from ebbtide.coordinator.run_events import RunEvents
from ebbtide.coordinator.state.coordinator_state import CoordinatorState
from ebbtide.coordinator.state.run_state import RunState
from ebbtide.coordinator.state.worker_messages import ReleaseReason
from ebbtide.coordinator.state.worker_session import WorkerSession
from ebbtide.types.fleet import WorkerState
from ebbtide.types.run import WorkerChange

#: A host is borrowed for at least so long before its cost, a recent mean, counts.
_DWELL_S: Final = 30.0
#: A host is given up for at least so long; the pause doubles up to the second value, unless the host was good for so
#: many pauses before.
_PAUSE_S: Final = 30.0
_LONGEST_PAUSE_S: Final = 1_800.0
_FORGIVEN: Final = 4.0
#: A host is given up if its cost exceeds its gain by this factor, and borrowed again in the reverse case.
_SURE: Final = 1.25
#: A smaller part of the error budget is chance, and no reason to give a host up.
_CHANCE: Final = 0.02
#: Half-life of the demand for borrowed hosts: it falls at the end of a training step, and the next step needs them
#: again.
_HALF_LIFE_S: Final = 60.0
#: A worker that was not judged for so long is forgotten.
_REMEMBERED_S: Final = 3_600.0


class Lender(Struct, frozen=True, kw_only=True):
    """A worker beside a serving engine."""

    worker_id: str
    slots: int
    share: float  # of the next minute in which it may generate, as its guard forecasts
    disturbance: float  # share of the error budget used
    known: bool = True  # there is a forecast; without one the host is not judged
    speed: WorkerThroughput | None = None
    context: float = 0.0  # mean tokens of its rollouts


class LenderVerdict(NamedTuple):
    wanted: bool
    reason: str = ""  # if not wanted


class _Host(Struct):
    changed_at: float  # when it was borrowed or given up, or last had no forecast
    seen: float
    borrow: bool = True
    cause: str = ""
    until: float = 0.0  # not borrowed again before
    pause_s: float = 0.5 * _PAUSE_S  # the last one


class LenderSelection:
    """Judges the hosts. `_hosts` has those judged lately. A host that was given up shows no cost any more: it is tried
    again after a pause, which doubles each time that fails soon."""

    def __init__(self) -> None:
        self._hosts: dict[str, _Host] = {}
        self._wanting = 0.0
        self._asked: float | None = None

    def decide(self, lenders: Sequence[Lender], wanting: int, now: float) -> dict[str, LenderVerdict]:
        """The verdicts, every few seconds. `wanting`: rollouts that only borrowed workers have a slot for."""
        brought = self._brought(lenders, self._lately(wanting, now))
        for lender in lenders:
            host = self._hosts.setdefault(lender.worker_id, _Host(now, now))
            host.seen = now
            if not lender.known:
                host.changed_at = now if host.borrow else host.changed_at
            elif host.borrow:
                self._judge(host, lender, brought[lender.worker_id], now)
            elif now >= host.until and brought[lender.worker_id] > _SURE * lender.disturbance:
                host.borrow, host.changed_at, host.cause = True, now, ""
        for worker_id, host in list(self._hosts.items()):
            if now - host.seen > _REMEMBERED_S:
                del self._hosts[worker_id]
        return {one.worker_id: self.verdict(one.worker_id) for one in lenders}

    def verdict(self, worker_id: str) -> LenderVerdict:
        """The last verdict; an unknown worker is borrowed."""
        host = self._hosts.get(worker_id)
        return LenderVerdict(host.borrow, host.cause) if host else LenderVerdict(wanted=True)

    def _lately(self, wanting: int, now: float) -> float:
        faded = 0.5 ** ((now - self._asked) / _HALF_LIFE_S) if self._asked is not None else 0.0
        self._asked = now
        self._wanting = max(float(wanting), self._wanting * faded)
        return self._wanting

    def _brought(self, lenders: Sequence[Lender], wanting: float) -> dict[str, float]:
        """Each host's gain, if borrowed hosts are filled before others, and the least disturbed first."""

        def order(lender: Lender) -> tuple[bool, float, str]:
            host = self._hosts.get(lender.worker_id)
            return host is not None and not host.borrow, lender.disturbance / (lender.share or 1e-9), lender.worker_id

        brought = {}
        for lender in sorted(lenders, key=order):
            taken = min(float(lender.slots), wanting)
            wanting -= taken
            brought[lender.worker_id] = min(1.0, lender.share) * _filled(lender, taken)
        return brought

    def _judge(self, host: _Host, lender: Lender, brought: float, now: float) -> None:
        lasted_s, disturbance = now - host.changed_at, lender.disturbance
        used_up = disturbance >= 1.0
        costs = disturbance > max(_CHANCE, _SURE * brought) and lasted_s >= _DWELL_S
        if not used_up and not costs:
            return
        needed = brought > 0.0 or not lender.share
        if used_up:
            host.cause = "its requests used up their error budget while rollouts ran"
        elif needed:
            host.cause = f"it takes {disturbance:.0%} of the error budget, and brings {brought:.0%} of its speed"
        else:
            host.cause = "others have room for all rollouts"
        if needed:
            forgiven = lasted_s > _FORGIVEN * host.pause_s and host.pause_s >= _PAUSE_S
            host.pause_s = _PAUSE_S if forgiven else min(_LONGEST_PAUSE_S, 2.0 * host.pause_s)
        host.borrow, host.changed_at, host.until = False, now, now + (host.pause_s if needed else _PAUSE_S)


def _filled(lender: Lender, rollouts: float) -> float:
    """The host's throughput with so many rollouts, as a share of that with full slots."""
    if rollouts <= 0.0:
        return 0.0
    if lender.speed is not None and (full := lender.slots * lender.speed.rate(lender.slots, lender.context)):
        return min(1.0, rollouts * lender.speed.rate(max(1.0, rollouts), lender.context) / full)
    return min(1.0, rollouts / lender.slots)


log = telemetry.get_logger(__name__)
#: Hosts are judged so often: the verdict depends on means over minutes.
_JUDGE_EVERY_S: Final = 2.0


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
                free(session, session.attempts.values(), ReleaseReason.HOST_GIVEN_UP, now)

    def release(self, run: RunState, workers: Sequence[tuple[WorkerSession, WorkerView]], now: float) -> None:
        """Take from workers whose host was reclaimed for long what others could continue. `workers`: the run's."""
        reclaimed = [one for one, _ in workers if one.attempts and (lent := one.lent(now)) is not None and lent.ripe]
        if not reclaimed:
            return
        takers = [worker for session, worker in workers if not worker.shut and not session.gone]
        room = sum(max(0, worker.slots - worker.running) for worker in takers if not worker.held) - len(run.queue)
        for session in reclaimed:
            lent = session.lent(now)
            mine = [
                attempt
                for attempt in session.attempts.values()
                if attempt.run_id == run.run_id
                and attempt.attempt_id not in session.freed
                and any(may_take(attempt.rollout, worker) for worker in takers)
            ]
            if lent is None or not mine:
                continue
            lengths = [one.length for one in mine]
            freed = [mine[at] for at in leaving(lent, lengths, room=room, prefill=self._prefills.typical)]
            room -= len(freed)
            free(session, freed, ReleaseReason.HOST_RECLAIMED, now)

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
        self._run_events.of_worker(session, text, WorkerChange.BORROWED if verdict.wanted else WorkerChange.GIVEN_UP)

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
        free = sum(max(0, one.slots - len(one.attempts)) for one in steady if one.state is not WorkerState.QUARANTINED)
        waiting = sum(len(run.queue) for run in self._state.runs.values())
        lent = sum(len(one.attempts) for one in self._state.sessions.values() if one.borrowed)
        return max(0, waiting + lent - free)
