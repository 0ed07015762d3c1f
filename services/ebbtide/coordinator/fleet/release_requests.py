"""Asks workers for rollouts back.

Invariant: an attempt is asked back on account of its worker once (`WorkerSession.freed`), and again only if it is not
handed back for long. A worker that still keeps it is given up (`WorkerHealth`).
"""

from collections.abc import Iterable, Sequence
from typing import Final

from ebbtide import telemetry
from ebbtide.coordinator.state.coordinator_state import ReleaseRequest, RunningAttempt, WorkerSession
from ebbtide.types.fleet import AttemptRef

log = telemetry.get_logger(__name__)
#: After so long without the attempt it is asked for again.
_AGAIN_S: Final = 15.0


def free(session: WorkerSession, attempts: Iterable[RunningAttempt], reason: str, now: float) -> None:
    """Ask the worker for these attempts, unless it was asked already."""
    refs = [
        one
        for one in attempts
        if not one.leaving and not one.target and one.session is session and one.attempt_id not in session.freed
    ]
    if not refs or session.gone:
        return
    session.freed.update((one.attempt_id, ReleaseRequest(reason, now, now)) for one in refs)
    _ask(session, [one.ref for one in refs], reason)


def remind(session: WorkerSession, now: float) -> None:
    """Ask again for what the worker still has long after the request."""
    if not session.freed:
        return
    session.freed = {name: freed for name, freed in session.freed.items() if name in session.attempts}
    late: dict[str, list[AttemptRef]] = {}
    for name, freed in session.freed.items():
        if now - freed.last >= _AGAIN_S:
            freed.last = now
            late.setdefault(freed.reason, []).append(session.attempts[name].ref)
    for reason, refs in late.items():
        _ask(session, refs, reason)


def _ask(session: WorkerSession, refs: Sequence[AttemptRef], reason: str) -> None:
    session.ask_back(refs, reason)
    log.info("freed", worker_id=session.worker_id, rollouts=len(refs), reason=reason)
