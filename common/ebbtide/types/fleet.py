"""Defines workers, their engines and their attempts as the fleet sees them, and why attempts end."""

from enum import IntEnum
from math import ceil
from typing import Annotated, Final

from msgspec import Meta, Struct

from ebbtide.types.ids import check_id
from ebbtide.types.weights import PolicyVersion


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
    NOT_STATED = 11  # handed back without a reason
    NO_MEMORY = 12  # its engine's memory was full of others' keys and values; said by workers of the commit before
    SHORT_CONTEXT = 13  # it filled its engine's context, which is shorter than the run's


#: Causes that a worker may name when it hands back an attempt.
RELEASE_CAUSES: Final = frozenset(
    {
        EndCause.MOVED,
        EndCause.WRONG_VERSION,
        EndCause.WORKER_LEAVES,
        EndCause.FAILED,
        EndCause.NOT_STATED,
        EndCause.NO_MEMORY,
        EndCause.SHORT_CONTEXT,
    }
)


#: Grows when the meaning of the streams changes. Peers with different numbers refuse each other at attach.
PROTOCOL_VERSION: Final = 2
#: A worker sends the tokens of its interactive rollouts so often, unless it is told another interval: people take text
#: that comes so for a steady flow.
INTERACTIVE_FLUSH_S: Final = 0.05


class EndReason(Struct, frozen=True):
    """Why attempts end."""

    cause: EndCause
    text: str  # the same for people, in spans and dead letters
    blame: bool = False  # the rollout itself may be the reason
    noticed_s: float | None = None  # seconds from the worker's last sign of life to its loss, if it was lost

    @property
    def avoid(self) -> bool:
        """Whether the rollout must not return to that worker."""
        return self.cause is EndCause.WORKER_SUSPECTED

    @property
    def moved(self) -> bool:
        """Whether the coordinator moved the attempt."""
        return self.cause is EndCause.MOVED


class WorkerKind(IntEnum):
    RESERVED = 1
    SPOT = 2
    BORROWED = 3


class WorkerState(IntEnum):
    BOOTING = 1
    READY = 2
    INSTALLING = 3
    DRAINING = 4
    LOST = 5
    SUSPECTED = 6
    QUARANTINED = 7


class AppendStatus(IntEnum):
    STORED = 1
    GAP = 2
    SUPERSEDED = 3


class FlushWindow(Struct, frozen=True):
    """What a lost worker may lose of each rollout, with prompt acknowledgements: so many tokens, or those of so long,
    whichever is less.
    """

    tokens: int
    interval_s: float

    def stretched(self, least_s: float) -> "FlushWindow":
        """The window with an interval of at least `least_s` seconds; its tokens grow in proportion."""
        if not 0 < self.interval_s < least_s:
            return self
        return FlushWindow(ceil(self.tokens * least_s / self.interval_s), least_s)


class FlushPace(Struct, frozen=True):
    """How often a worker may flush at most, seconds between two messages; 0.0: as often as it is set to."""

    least_s: float = 0.0
    interactive_s: float = 0.0  # of its interactive rollouts


class AttemptRef(Struct, frozen=True):
    run_id: str
    rollout_id: str
    attempt_id: str


def check_attempt(ref: AttemptRef, *, field: str) -> None:
    """Raise `InvalidRequest` naming the field that is not an id. The store joins ids with its own separators."""
    for name in ref.__struct_fields__:
        check_id(getattr(ref, name), field=f"{field}.{name}")


class EngineInfo(Struct, frozen=True, kw_only=True):
    """An engine's model and limits."""

    model: Annotated[str, Meta(max_length=4096)]
    vocab_size: int  # token ids are below it
    max_model_len: int  # tokens of prompt plus response
    eos_token_ids: Annotated[tuple[int, ...], Meta(max_length=1024)] = ()
    architecture: Annotated[str, Meta(max_length=128)] = ""
    kv_tokens: Annotated[int, Meta(ge=0, le=1 << 53)] = 0  # whose keys and values its memory holds; 0: it does not say
    device: Annotated[str, Meta(max_length=128)] = ""  # engines on devices of one name are about as fast
    kv_block: Annotated[int, Meta(ge=0, le=1 << 20)] = 0  # tokens by which that memory is given out; 0: not said
    shares_prefixes: bool = False  # prompts with an equal beginning share its memory


class BorrowedState(Struct, frozen=True, kw_only=True, gc=False):
    """A borrowed worker's knowledge of its host."""

    granted: bool = False
    share: Annotated[float, Meta(ge=0, le=1)] = 0.0  # of the next minute: the worker may generate for so long
    spell_s: Annotated[float, Meta(ge=0)] = 0.0  # how long the present state will probably last
    disturbance: Annotated[float, Meta(ge=0)] = 0.0  # share of the SLO's error budget that was used lately
    asleep: bool = False
    hand_over: bool = False  # while not granted: its rollouts are to go on elsewhere at once


class DraftingState(Struct, frozen=True, kw_only=True, gc=False):
    """What a worker's drafts came to since its engine's start."""

    drafts: Annotated[int, Meta(ge=0)] = 0
    drafted: Annotated[int, Meta(ge=0)] = 0  # tokens
    accepted: Annotated[int, Meta(ge=0)] = 0  # of these
    tree_bytes: Annotated[int, Meta(ge=0)] = 0  # of the groups' tokens that it drafts from


class Worker(Struct, frozen=True, kw_only=True):
    worker_id: str
    kind: WorkerKind
    state: WorkerState
    slots: int
    site: str = ""
    running: int = 0
    tokens_per_s: float = 0.0
    installed: tuple[PolicyVersion, ...] = ()
    last_heartbeat_s: float = 0.0
    tokens_generated: int = 0
    busy_s: float = 0.0
    uptime_s: float = 0.0
    engine: EngineInfo | None = None
    waiting: int = 0
    plateau: int = 0
    quarantined_s: float = 0.0
    reason: str = ""
    borrowed: BorrowedState | None = None
    given_up: bool = False
    prefill_tokens_per_s: float = 0.0
    rollout_tokens_per_s: float = 0.0
    offered_slots: int = 0
    unadmitted: int = 0  # of `running`: wait for the engine's memory
    parked: int = 0  # times that a rollout gave up its memory for others
    preemptions: int = 0  # times that the engine by itself took a rollout's memory
    drafting: DraftingState | None = None
