"""How attempts end, and when a rollout has had too many that came to nothing."""

from typing import Final

from ebbtide.types.text_bounds import MAX_EVENT_BYTES, shortened

#: The reason that the coordinator gives a worker with a rollout that it takes from it, and gets back with the rollout:
#: also when it has given the move up meanwhile, or the worker drains.
MOVED: Final = "moved"
#: Reasons to hand an attempt back that say nothing about its rollout.
_LEAVING: Final = (MOVED, "drain", "preempt", "reclaim", "shutdown", "version")


def blames(reason: str) -> bool:
    """Whether an attempt that a worker handed back for `reason`, without a new token, counts against its rollout."""
    return bool(reason) and not reason.lower().startswith(_LEAVING)


def dead_letter(barren: int, evidence: str, *, limit: int) -> str | None:
    """The message of the dead letter that a rollout becomes after `limit` attempts in a row without a new token."""
    if barren < limit:
        return None
    message = f"{barren} attempts in a row ended without a new token: {evidence.rstrip('; ')}"
    return shortened(message, MAX_EVENT_BYTES // 2)  # an event tells it
