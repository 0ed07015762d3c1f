"""Defines the messages between a guard and the worker or the trainer on its host, and the guard's status."""

from enum import IntEnum
from typing import Annotated, Final

from msgspec import Meta, Struct

#: Increased when the meaning of messages or of the page changes; guard and worker of different versions refuse each
#: other.
GRANTS_VERSION: Final = 1
#: No grant is longer: a worker stands still this long after its guard died, froze or was cut off.
GRANT_S: Final = 0.2
#: A share without any cases.
UNKNOWN: Final = -1.0

Share = Annotated[float, Meta(ge=0)]


class Residency(IntEnum):
    """Where the weights of a borrowed worker's engine are."""

    AWAKE = 1
    HOST = 2
    AWAY = 3


class Budget(Struct, frozen=True):
    """The most that the next step may take. Without tokens the engine stands still."""

    tokens: int = 0
    sequences: int = 0
    until: float = 0.0  # no step begins at or after this time, in seconds of the monotonic clock


class Forecast(Struct, frozen=True, kw_only=True):
    """What a borrower can expect."""

    share: Share = 0.0  # of the next minute in which it may generate
    spell_s: Share = 0.0  # how long the present state, idle or busy, will probably last
    disturbance: Share = 0.0  # of the SLO's error budget that rollouts have used lately
    hand_over: bool = False  # while reclaimed: rollouts are to go on elsewhere at once, as the lender waits for them


class Hello(Struct, frozen=True, kw_only=True):
    """A worker's first message."""

    protocol_version: int
    worker_id: Annotated[str, Meta(max_length=128)]
    pids: Annotated[tuple[int, ...], Meta(max_length=256)] = ()
    slots: int = 0
    step_tokens: int = 0
    kv_bytes: int = 0
    weights_bytes: int = 0
    device: Annotated[str, Meta(max_length=256)] = ""


class BorrowerReport(Struct, frozen=True, kw_only=True):
    """A worker's later messages. Tokens are sums since the worker's start."""

    running: int = 0
    tokens_generated: int = 0
    kv_bytes_used: int = 0
    recomputed_tokens: int = 0
    residency: Residency = Residency.AWAKE
    wanted: bool = True
    wake_host_s: float = 0.0
    wake_away_s: float = 0.0
    grant: int = 0  # sequence of the newest grant that this follows; 0: not told
    moving: bool = False  # the weights are on their way from `residency`


class Grant(Struct, frozen=True, kw_only=True):
    """The guard's answer: what the worker may use until the grant expires."""

    sequence: int
    tokens: int = 0
    sequences: int = 0
    expires_s: Annotated[float, Meta(ge=0, le=GRANT_S)] = GRANT_S  # from its arrival
    kv_bytes: int = 0
    residency: Residency = Residency.AWAKE
    forecast: Forecast = Forecast()


class Latency(Struct, frozen=True, kw_only=True):
    """Latency of recent served requests, in seconds."""

    p50: float = 0.0
    p95: float = 0.0
    p99: float = 0.0
    target: float = 0.0  # 0: still being learnt
    attained: float = UNKNOWN  # share of requests within the target
    unloaded: float = 0.0


class ModelLatency(Struct, frozen=True, kw_only=True):
    """Latency of one model's requests."""

    model: str = ""  # empty: all models without an SLO of their own
    ttft: Latency = Latency()
    tpot: Latency = Latency()


class Borrower(Struct, frozen=True, kw_only=True):
    """One borrower in the guard's status. The fields are those of grants.proto."""

    worker_id: str
    state: str = ""
    running: int = 0
    tokens_per_s: float = 0.0
    tokens_harvested: int = 0
    gpu_seconds: float = 0.0
    kv_bytes: int = 0
    kv_bytes_used: int = 0
    memory: str = ""
    residency: Residency = Residency.AWAKE
    reclaims: int = 0
    reclaim_p50_s: float = 0.0
    reclaim_p99_s: float = 0.0
    stops: int = 0
    recomputed_tokens: int = 0


class GuardStatus(Struct, frozen=True, kw_only=True):
    """The guard's status. The fields are those of grants.proto."""

    model: str = ""
    mode: str = ""
    state: str = ""
    inside: int = 0
    waiting: int = 0
    load: float = 0.0
    requests: int = 0
    failed: int = 0
    ttft: Latency = Latency()
    tpot: Latency = Latency()
    slack_s: float = -1.0
    tokens: int = 0
    sequences: int = 0
    borrowers: tuple[Borrower, ...] = ()
    forecast: Forecast = Forecast()
    memory_limit: int = 0
    serving_kv_bytes: int = 0
    uptime_s: float = 0.0
    models: tuple[ModelLatency, ...] = ()


#: Increased when the meaning of messages changes; guard and trainer of different versions refuse each other.
LOANS_VERSION: Final = 1


class OwnerWish(Struct, frozen=True, kw_only=True):
    """What the owner wants of its device, stated whole each time."""

    protocol_version: int
    run_id: Annotated[str, Meta(max_length=128)]
    owner: Annotated[str, Meta(min_length=1, max_length=128)]
    lease: Annotated[int, Meta(ge=0)] = 0
    sequence: Annotated[int, Meta(ge=0)] = 0
    lend: bool = False
    spell_s: Annotated[float, Meta(ge=0)] = 0.0  # how long the wish will probably stand; 0: unknown
    hand_over: bool = False  # of a wish to have the device: what its engines run is to go on elsewhere at once
    #: Of a trainer that takes turns with others: its processes on this host.
    pids: Annotated[tuple[Annotated[int, Meta(ge=0, lt=1 << 32)], ...], Meta(max_length=256)] = ()
    priority: Annotated[int, Meta(ge=-(1 << 31), lt=1 << 31)] = 0  # of those that wait for a turn, higher ones go first


class LoanState(Struct, frozen=True, kw_only=True):
    """What became of the wish with this number."""

    sequence: int
    compute_back: bool = False  # no engine steps, and none may begin
    memory_back: bool = False  # engines gave up what they were to give up
    waits_for: str = ""  # for people
    repeat_s: float = 0.0  # how often a state that stays the same is repeated; 0: never
    engine_bytes: int = 0  # of the device that an engine needs to come back; 0: none, or unknown
    turn: int = 0  # number of the trainer's turn; 0: it has none, or the guard knows no turns
    expires_s: Annotated[float, Meta(ge=0)] = 0.0  # the turn may be used for so long from the message's arrival


class DeviceStatus(Struct, frozen=True, kw_only=True):
    """The guard's status. The fields are those of loans.proto."""

    state: str = ""
    run_id: str = ""
    lease: int = 0
    compute_back: bool = False
    memory_back: bool = False
    waits_for: str = ""
    borrowers: tuple[Borrower, ...] = ()
    forecast: Forecast = Forecast()
    held_s: float = 0.0
    lent_s: float = 0.0
    take_backs: int = 0
    uptime_s: float = 0.0
    turn: int = 0  # number of the newest turn
    queue: tuple[str, ...] = ()  # runs that wait for a turn, in their order
    lost: int = 0  # turns that ended by their trainer's death
