"""What a serving-guard grants to the worker beside it, and what the two tell each other."""

from enum import IntEnum
from typing import Annotated, Final

from msgspec import Meta, Struct

#: Raised when the meaning of messages or of the page changes; guard and worker that differ refuse each other.
GRANTS_VERSION: Final = 1
#: No grant is longer: this long after its guard died, froze or was cut off a worker stands still.
GRANT_S: Final = 0.2
#: A share of nothing.
UNKNOWN: Final = -1.0

Share = Annotated[float, Meta(ge=0)]


class Residency(IntEnum):
    """Where the weights of a borrowed worker's engine are."""

    AWAKE = 1
    HOST = 2
    AWAY = 3


class Budget(Struct, frozen=True):
    """What the next step may take: `tokens` and `sequences` at most, and no step begins at or after `until` (seconds of
    the monotonic clock). Without tokens the engine stands still."""

    tokens: int = 0
    sequences: int = 0
    until: float = 0.0


class Forecast(Struct, frozen=True, kw_only=True):
    """What a borrower may expect. `share`: of the next minute in which it may generate; `spell_s`: how long what holds
    now will probably still last; `disturbance`: share of the SLO's error budget used lately beside rollouts."""

    share: Share = 0.0
    spell_s: Share = 0.0
    disturbance: Share = 0.0


class Hello(Struct, frozen=True, kw_only=True):
    protocol_version: int
    worker_id: Annotated[str, Meta(max_length=128)]
    pids: Annotated[tuple[int, ...], Meta(max_length=256)] = ()
    slots: int = 0
    step_tokens: int = 0
    kv_bytes: int = 0
    weights_bytes: int = 0
    device: Annotated[str, Meta(max_length=256)] = ""


class BorrowerReport(Struct, frozen=True, kw_only=True):
    running: int = 0
    tokens_generated: int = 0
    kv_bytes_used: int = 0
    recomputed_tokens: int = 0
    residency: Residency = Residency.AWAKE
    wanted: bool = True
    wake_host_s: float = 0.0
    wake_away_s: float = 0.0


class Grant(Struct, frozen=True, kw_only=True):
    """`expires_s` counts from its arrival and is at most `GRANT_S`."""

    sequence: int
    tokens: int = 0
    sequences: int = 0
    expires_s: Annotated[float, Meta(ge=0, le=GRANT_S)] = GRANT_S
    kv_bytes: int = 0
    residency: Residency = Residency.AWAKE
    forecast: Forecast = Forecast()


class Latency(Struct, frozen=True, kw_only=True):
    """Of the served requests lately, seconds. `target` 0: still being learnt; `attained`: `UNKNOWN` until one was
    judged."""

    p50: float = 0.0
    p95: float = 0.0
    p99: float = 0.0
    target: float = 0.0
    attained: float = UNKNOWN
    unloaded: float = 0.0


class ModelLatency(Struct, frozen=True, kw_only=True):
    """`model` empty: all that have no SLO of their own."""

    model: str = ""
    ttft: Latency = Latency()
    tpot: Latency = Latency()


class Borrower(Struct, frozen=True, kw_only=True):
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
    """Field by field as in grants.proto."""

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
