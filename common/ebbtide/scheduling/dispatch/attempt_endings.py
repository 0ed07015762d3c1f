"""How attempts end, and when a rollout has had too many that came to nothing."""

from typing import Final

from ebbtide.types.end_cause import EndCause
from ebbtide.types.text_bounds import MAX_EVENT_BYTES, shortened

#: Ends that may be the rollout's own doing. All others say nothing about it.
_BLAMING: Final = frozenset({EndCause.FAILED, EndCause.WORKER_LOST, EndCause.WORKER_SUSPECTED})


def blames(cause: EndCause) -> bool:
    """Whether an attempt that ended for `cause`, without a new token, counts against its rollout."""
    return cause in _BLAMING


def dead_letter(barren: int, evidence: str, *, limit: int) -> str | None:
    """The message of the dead letter that a rollout becomes after `limit` attempts in a row without a new token."""
    if barren < limit:
        return None
    message = f"{barren} attempts in a row ended without a new token: {evidence.rstrip('; ')}"
    return shortened(message, MAX_EVENT_BYTES // 2)  # an event tells it
