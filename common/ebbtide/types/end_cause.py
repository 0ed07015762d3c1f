"""Names why attempts end, on the wire, in the store and in decisions. Texts beside the causes are for people."""

from enum import IntEnum
from typing import Final


class EndCause(IntEnum):
    """Numbers as in `EndCause` of the protos, which the store keeps too. Never reuse one."""

    FINISHED = 1
    CANCELLED = 2  # by the run's lease holder, or because the rollout ended otherwise
    RUN_ENDED = 3
    MOVED = 4  # the coordinator moved it to another worker
    WRONG_VERSION = 5  # its worker has no installed version that the rollout allows
    WORKER_LEAVES = 6  # its worker drains, is preempted or shuts down
    FAILED = 7  # its worker refused it or failed to generate it
    WORKER_LOST = 8  # its worker's stream ended
    WORKER_SUSPECTED = 9  # its worker was silent or made no token; the rollout avoids that worker from now on
    NOT_HELD = 10  # no worker reported it after a restart, or its worker dropped it
    UNSAID = 11  # handed back without a reason
    NO_MEMORY = 12  # its engine's memory was full of others' keys and values; said by workers of the commit before
    SHORT_CONTEXT = 13  # it filled its engine's context, which is shorter than the run's


#: Causes that a worker may name when it hands back an attempt.
HAND_BACKS: Final = frozenset(
    {
        EndCause.MOVED,
        EndCause.WRONG_VERSION,
        EndCause.WORKER_LEAVES,
        EndCause.FAILED,
        EndCause.UNSAID,
        EndCause.NO_MEMORY,
        EndCause.SHORT_CONTEXT,
    }
)
