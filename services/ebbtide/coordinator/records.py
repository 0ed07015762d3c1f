"""What workers say on the control stream, as checked records."""

from typing import Annotated

from msgspec import Meta, Struct

from ebbtide.types.fleet import AttemptRef, EngineInfo, WorkerKind, WorkerState
from ebbtide.types.weights import PolicyVersion


class HeldAttempt(Struct, frozen=True, kw_only=True):
    attempt: AttemptRef
    offset: int = 0


class Attach(Struct, frozen=True, kw_only=True):
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
    flush_interval_s: float = 0.0


class Heartbeat(Struct, frozen=True, kw_only=True):
    state: WorkerState = WorkerState.READY
    tokens_per_s: float = 0.0
    tokens_generated: int = 0
    busy_s: float = 0.0
    uptime_s: float = 0.0
    waiting: int = 0
    held: bool = False
    quiet_s: float = 0.0


class Installed(Struct, frozen=True, kw_only=True):
    version: PolicyVersion
    run_id: str
    pull_s: float = 0.0
    pause_s: float = 0.0


class InstallFailed(Struct, frozen=True, kw_only=True):
    """`architecture`: of the version, where it is not the engine's."""

    version: PolicyVersion
    run_id: str
    message: str = ""
    architecture: str = ""


class Released(Struct, frozen=True, kw_only=True):
    attempts: tuple[AttemptRef, ...] = ()
    reason: str = ""


class DrainNotice(Struct, frozen=True, kw_only=True):
    deadline_s: float = 0.0
    reason: str = ""
