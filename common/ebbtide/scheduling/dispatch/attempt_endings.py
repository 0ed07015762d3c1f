"""Judges ended attempts: which count against their rollout, and when a rollout has had too many without progress."""

from typing import Final

from ebbtide.types.end_cause import EndCause
from ebbtide.types.text_bounds import MAX_EVENT_BYTES, shortened

#: Causes that may lie with the rollout itself.
_BLAMING: Final = frozenset({EndCause.FAILED, EndCause.WORKER_LOST, EndCause.WORKER_SUSPECTED})


def blames(cause: EndCause) -> bool:
    """Whether an attempt that ended for `cause`, without a new token, counts against its rollout."""
    return cause in _BLAMING


def dead_letter_message(no_progress: int, evidence: str, *, limit: int) -> str | None:
    """The message of the dead letter that a rollout becomes after `limit` attempts in a row without a new token."""
    if no_progress < limit:
        return None
    message = f"{no_progress} attempts in a row ended without a new token: {evidence.rstrip('; ')}"
    return shortened(message, MAX_EVENT_BYTES // 2)  # it travels in an event
