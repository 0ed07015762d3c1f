"""Asks workers for rollouts back.

Invariant: an attempt is asked back on account of its worker once (`WorkerSession.freed`), and again only if it is not
handed back for long. A worker that still keeps it is given up (`WorkerHealth`).
"""

from collections.abc import Iterable, Sequence
from typing import Final

from ebbtide import telemetry
from ebbtide.coordinator.state.running_attempt import RunningAttempt
from ebbtide.coordinator.state.worker_session import WorkerSession
from ebbtide.types.fleet import AttemptRef

log = telemetry.get_logger(__name__)
#: After so long without the attempt it is asked for again.
_AGAIN_S: Final = 15.0


def free(session: WorkerSession, attempts: Iterable[RunningAttempt], reason: str, now: float) -> None:
    """Ask the worker for these attempts, unless it was asked already."""
    refs = [
        one.ref
        for one in attempts
        if not one.leaving and not one.target and one.session is session and one.attempt_id not in session.freed
    ]
    if refs and not session.gone:
        _ask(session, refs, reason, now)


def remind(session: WorkerSession, now: float) -> None:
    """Ask again for what the worker still has long after the request."""
    if not session.freed:
        return
    late: dict[str, list[AttemptRef]] = {}
    for name, freed in session.freed.items():
        if now - freed.last >= _AGAIN_S:
            late.setdefault(freed.reason, []).append(session.attempts[name].ref)
    for reason, refs in late.items():
        _ask(session, refs, reason, now)


def _ask(session: WorkerSession, refs: Sequence[AttemptRef], reason: str, now: float) -> None:
    session.free(refs, reason, now)
    log.info("freed", worker_id=session.worker_id, rollouts=len(refs), reason=reason)
