"""Checks what workers report on the control stream. Impossible numbers are refused by field name, so that decisions can
trust them. Texts that are too long are cut instead: no worker is kept from leaving by a text.
"""

from typing import Annotated, Final, TypeAlias

from msgspec import Meta, Struct
from msgspec.structs import force_setattr

from ebbtide.types.fleet import (
    RELEASE_CAUSES,
    AttemptRef,
    BorrowedState,
    DraftingState,
    EndCause,
    EngineInfo,
    WorkerKind,
    WorkerState,
)
from ebbtide.types.ids import shortened
from ebbtide.types.weights import PolicyVersion

#: Thirty years; counts that a float holds exactly; more tokens/s than any machine generates.
_Seconds: TypeAlias = Annotated[float, Meta(ge=0, le=1e9)]
_Tokens: TypeAlias = Annotated[int, Meta(ge=0, le=1 << 53)]
_Rate: TypeAlias = Annotated[float, Meta(ge=0, le=1e9)]
#: The worker reads its two clocks one after the other.
_SLACK_S: Final = 1.0
#: States that a worker reports itself; the coordinator finds the others.
_SAID: Final = frozenset({WorkerState.READY, WorkerState.INSTALLING, WorkerState.DRAINING})


class HeldAttempt(Struct, frozen=True, kw_only=True):
    attempt: AttemptRef
    offset: int = 0


class AttachReport(Struct, frozen=True, kw_only=True):
    worker_id: str
    kind: WorkerKind
    protocol_version: int
    slots: Annotated[int, Meta(ge=1, le=1 << 16)]
    engine: EngineInfo
    site: Annotated[str, Meta(max_length=128)] = ""
    capabilities: tuple[str, ...] = ()
    held: tuple[HeldAttempt, ...] = ()
    installed: Annotated[tuple[PolicyVersion, ...], Meta(max_length=64)] = ()
    flush_tokens: int = 0
    run_id: str = ""
    flush_interval_s: _Seconds = 0.0


class HeartbeatReport(Struct, frozen=True, kw_only=True, gc=False):
    state: WorkerState = WorkerState.READY
    tokens_per_s: _Rate = 0.0
    tokens_generated: _Tokens = 0
    busy_s: _Seconds = 0.0
    uptime_s: _Seconds = 0.0
    held: bool = False
    quiet_s: _Seconds = 0.0
    install_s: _Seconds = 0.0
    restart_s: _Seconds = 0.0
    prompt_reads: _Tokens = 0
    prompt_tokens: _Tokens = 0
    prompt_s: _Seconds = 0.0
    unadmitted: _Tokens = 0
    parked: _Tokens = 0
    preemptions: _Tokens = 0
    borrowed: BorrowedState | None = None
    drafting: DraftingState | None = None

    def __post_init__(self) -> None:
        if self.state not in _SAID:
            raise ValueError(f"state is not a worker's to say ({self.state.name})")
        if self.busy_s > self.uptime_s + _SLACK_S:
            raise ValueError(f"busy_s is more than uptime_s ({self.busy_s:g} > {self.uptime_s:g})")


class InstalledReport(Struct, frozen=True, kw_only=True):
    version: PolicyVersion
    run_id: str
    pull_s: _Seconds = 0.0
    pause_s: _Seconds = 0.0


class InstallFailedReport(Struct, frozen=True, kw_only=True):
    version: PolicyVersion
    run_id: str
    message: str = ""
    architecture: Annotated[str, Meta(max_length=128)] = ""  # of the version, if it is not the engine's
    unreachable: bool = False  # the relay was away: the version itself may be good

    def __post_init__(self) -> None:
        force_setattr(self, "message", shortened(self.message))


class EngineChangedReport(Struct, frozen=True, kw_only=True):
    engine: EngineInfo
    run_id: str
    seconds: _Seconds = 0.0


class ReleasedReport(Struct, frozen=True, kw_only=True):
    """Attempts handed back. A cause that is unknown, or not for a worker to say, counts as FAILED."""

    attempts: tuple[AttemptRef, ...] = ()
    reason: str = ""  # for people
    cause: int = 0  # an `EndCause`

    def __post_init__(self) -> None:
        force_setattr(self, "cause", EndCause(self.cause) if self.cause in RELEASE_CAUSES else EndCause.FAILED)
        force_setattr(self, "reason", shortened(self.reason))


class DrainNotice(Struct, frozen=True, kw_only=True):
    deadline_s: Annotated[float, Meta(ge=0)] = 0.0  # a cloud may give any notice; no decision uses it
    reason: str = ""

    def __post_init__(self) -> None:
        force_setattr(self, "reason", shortened(self.reason))
