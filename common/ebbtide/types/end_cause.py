"""Why an attempt ends, as the wire, the store and decisions name it. The text that goes with it is for people."""

from enum import IntEnum
from typing import Final


class EndCause(IntEnum):
    """Numbers as in `EndCause` of the protos, which the store keeps too. Never reuse one."""

    FINISHED = 1
    CANCELLED = 2  # by its run's holder, or because the rollout ended otherwise
    RUN_ENDED = 3
    MOVED = 4  # the coordinator took it from its worker for another one
    WRONG_VERSION = 5  # its worker has no version installed that the rollout may be made under
    WORKER_LEAVES = 6  # its worker drains, is preempted or shuts down
    FAILED = 7  # its worker refused it, or failed at it
    WORKER_LOST = 8  # its worker's stream ended
    WORKER_SUSPECTED = 9  # its worker was silent or made no token, and is not given the rollout again
    NOT_HELD = 10  # no worker came back with it, or its worker has it no more
    UNSAID = 11  # handed back without a reason


#: What a worker can say of an attempt that it hands back.
HAND_BACKS: Final = frozenset(
    {EndCause.MOVED, EndCause.WRONG_VERSION, EndCause.WORKER_LEAVES, EndCause.FAILED, EndCause.UNSAID}
)
#: How texts began that programs without `EndCause` sent and stored, in lower case. Those of hand-backs stay as they
#: are: a coordinator of the former release decides by them.
_FORMER: Final = (
    ("finished", EndCause.FINISHED),
    ("cancelled", EndCause.CANCELLED),
    ("run ended", EndCause.RUN_ENDED),
    ("moved", EndCause.MOVED),
    ("version", EndCause.WRONG_VERSION),
    ("drain", EndCause.WORKER_LEAVES),
    ("preempt", EndCause.WORKER_LEAVES),
    ("reclaim", EndCause.WORKER_LEAVES),
    ("shutdown", EndCause.WORKER_LEAVES),
    ("worker lost", EndCause.WORKER_LOST),
    ("its worker left", EndCause.NOT_HELD),
    ("its worker did not come back", EndCause.NOT_HELD),
    ("its end was forgotten", EndCause.NOT_HELD),
    ("the store forgot", EndCause.NOT_HELD),
    ("the store did not know", EndCause.NOT_HELD),
    ("handed back", EndCause.UNSAID),
)


def cause_of(text: str) -> EndCause:
    """The cause that a text of the former release names: `Released.reason`, or the end of a span in the store."""
    found = text.lower()
    if not found:
        return EndCause.UNSAID
    return next((cause for start, cause in _FORMER if found.startswith(start)), EndCause.FAILED)
