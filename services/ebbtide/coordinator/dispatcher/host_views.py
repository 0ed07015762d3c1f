"""Shows workers to the decisions as hosts.

Invariant: a session's view is that of its present `revision`; with free slots and a typical worker's rate for its own,
that of the last lesson on speeds, too. Lost with the process, and made again.
"""

import math
from collections.abc import Callable
from typing import Final, NamedTuple

from ebbtide.coordinator.dispatcher.loss_watch import FOUND_S
from ebbtide.coordinator.dispatcher.prefill_speeds import PrefillSpeeds
from ebbtide.coordinator.dispatcher.rebalancer import Rebalancer
from ebbtide.coordinator.fleet.worker_trust import WorkerTrust
from ebbtide.coordinator.state.coordinator_state import CoordinatorState
from ebbtide.coordinator.state.run_state import RunState
from ebbtide.coordinator.state.worker_session import WorkerSession
from ebbtide.scheduling.dispatch.host_view import HostView

#: Views kept beyond the attached sessions, before those of sessions that are over are dropped.
_SPARE: Final = 64


class _Seen(NamedTuple):
    revision: int
    lesson: int  # -1: the speeds of others do not matter
    view: HostView | None  # None: it has no version of the run that it serves, or may get nothing


class HostViews:
    def __init__(
        self,
        state: CoordinatorState,
        trust: WorkerTrust,
        moves: Rebalancer,
        prefills: PrefillSpeeds,
        spell_s: Callable[[WorkerSession], float] = lambda _: math.inf,
    ) -> None:
        """`spell_s`: for how long a worker will stay, on average, in seconds."""
        self._state, self._trust, self._moves, self._prefills = state, trust, moves, prefills
        self._spell_s = spell_s
        self._seen: dict[str, _Seen] = {}

    def of(self, run: RunState, now: float) -> list[tuple[WorkerSession, HostView]]:
        """The workers that have a version of the run and may get its rollouts, full ones too."""
        steady_only = run.spec.borrow.max_rollouts == 0
        quarantined = self._trust.quarantined(now)
        lesson, seen = self._moves.lesson, self._seen
        found: list[tuple[WorkerSession, HostView]] = []
        for session in self._state.serving(run.run_id):
            known = seen.get(session.session_id)
            if known is None or known.revision != session.revision or known.lesson not in {lesson, -1}:
                known = self._look(run, session)
            if known.view is None or (steady_only and session.borrowed) or session.worker_id in quarantined:
                continue
            found.append((session, known.view))
        return found

    def coming(self, run: RunState, now: float) -> list[HostView]:
        """Workers that get a version soon, as full hosts: for rollouts that avoid all others. Call `of` first."""
        steady_only = run.spec.borrow.max_rollouts == 0
        unready = [one for one in self._state.serving(run.run_id) if self._seen[one.session_id].view is None]
        return [
            HostView(
                worker_id=session.session_id,
                name=session.worker_id,
                slots=1,
                running=1,
                installed=run.newest,
                target=run.newest,
                max_model_len=session.hello.engine.max_model_len,
                scores=session.scores_prompts,
                min_p=session.samples_min_p,
            )
            for session in unready
            if not _ready(run, session)
            and self._trust.trusts(session, now)
            and not (steady_only and session.borrowed)
            and session.unfit.get(run.run_id, 0.0) <= now
        ]

    def _look(self, run: RunState, session: WorkerSession) -> _Seen:
        if len(self._seen) > 2 * len(self._state.sessions) + _SPARE:
            self._seen = {name: one for name, one in self._seen.items() if name in self._state.sessions}
        serves = _ready(run, session) and not session.draining and not session.given_up
        view = self._host(run, session) if serves else None
        alone = view is None or view.running >= view.slots or self._moves.knows(session)
        seen = self._seen[session.session_id] = _Seen(session.revision, -1 if alone else self._moves.lesson, view)
        return seen

    def _host(self, run: RunState, session: WorkerSession) -> HostView:
        pending, running, slots = len(session.pending), len(session.attempts), session.slots
        said = session.beat.borrowed if session.borrowed else None
        return HostView(
            worker_id=session.session_id,
            name=session.worker_id,
            slots=slots,
            running=running,
            pending=pending,
            unread=sum(one.length - one.cached for one in session.pending.values()) if pending else 0,
            probation=sum(one.rollout.no_progress > 0 for one in session.pending.values()) if pending else 0,
            rate=self._moves.rate(session) if running < slots else 0.0,
            plateau=session.plateau,
            prefill=self._prefills.rate(session),
            held=session.beat.held,
            installed=session.version_of(run.run_id),
            target=session.target[1] if session.target else 0,
            max_model_len=session.hello.engine.max_model_len,
            shut=session.reclaimed or (said is not None and said.asleep),
            borrowed=session.borrowed,
            share=said.share if said else 1.0,
            spell_s=said.spell_s if said else self._spell_s(session),
            found_s=0.0 if said else FOUND_S,
            scores=session.scores_prompts,
            min_p=session.samples_min_p,
        )


def _ready(run: RunState, session: WorkerSession) -> bool:
    return session.target is not None and session.target[0] == run.run_id and session.version_of(run.run_id) > 0
