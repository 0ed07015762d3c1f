"""Declares the coordinator's settings."""

from typing import Annotated

from msgspec import Meta

from ebbtide.auth.security import ServerSettings
from ebbtide.coordinator.rules.liveness import TIMEOUT_S
from ebbtide.runtime import ProcessSettings


class CoordinatorSettings(ProcessSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Durations are seconds."""

    server: ServerSettings = ServerSettings.at("127.0.0.1:7600")
    store_url: Annotated[
        str,
        Meta(
            description="Redis 6.2 or newer: redis://, rediss://, unix:///path, "
            "or redis+sentinel://HOST:PORT,HOST:PORT/SERVICE",
            extra={"shared": True},
        ),
    ] = "redis://127.0.0.1:6379/0"
    store_password_file: Annotated[
        str, Meta(description="file that holds the store's password, in place of one in store_url; read at the start")
    ] = ""
    store_patience_s: Annotated[
        float, Meta(gt=0, description="how long a call waits for a store that is away, before it fails")
    ] = 3.0
    store_boot_s: Annotated[float, Meta(gt=0, description="how long a start waits for the store")] = 30.0
    store_replicas: Annotated[
        int, Meta(ge=0, description="so many of the store's replicas must have a write before it is acknowledged")
    ] = 0
    standby: Annotated[
        bool,
        Meta(description="wait while another coordinator leads, and take over when it is gone; without, take over now"),
    ] = False
    heartbeat_s: Annotated[float, Meta(gt=0, description="pause between a worker's heartbeats")] = 1.0
    heartbeat_timeout_s: Annotated[
        float, Meta(gt=0, description="a worker silent for so long is lost; its rollouts go elsewhere")
    ] = TIMEOUT_S
    reattach_grace_s: Annotated[
        float, Meta(ge=0, description="how long attempts wait for a worker whose stream broke")
    ] = 0.0
    recover_grace_s: Annotated[
        float, Meta(ge=0, description="how long attempts wait for their workers after the coordinator's start")
    ] = 5.0
    lease_ttl_s: Annotated[float, Meta(gt=0, description="a lease not renewed for so long may be claimed")] = 10.0
    max_open: Annotated[int, Meta(ge=1, description="rollouts queued and running, per run")] = 65536
    max_runs_per_user: Annotated[
        int, Meta(ge=1, description="live runs per user, by the name in the token; callers without a name count as one")
    ] = 100
    calls_per_user: Annotated[
        int,
        Meta(ge=0, description="calls of one user, by the name in the token, that are worked on at once; others wait"),
    ] = 4
    request_kept_s: Annotated[
        float,
        Meta(
            ge=1, description="how long a gateway's finished requests, without a session, and ended sessions are kept"
        ),
    ] = 600.0
    session_idle_s: Annotated[
        float, Meta(ge=1, description="a gateway's session that is not used for so long is dropped as abandoned")
    ] = 3600.0
    barren_attempts: Annotated[
        int, Meta(ge=1, description="attempts in a row without a new token that make a rollout a dead letter")
    ] = 5
    rebalance: Annotated[bool, Meta(description="move rollouts between workers where they end sooner by it")] = True
    slice_s: Annotated[
        float,
        Meta(gt=0, description="turns of runs at one worker last about so long, or ten times what a change takes"),
    ] = 2.0
    flushes_per_s: Annotated[
        float,
        Meta(ge=0, description="flushes that all workers may send together; larger fleets flush less often; 0: any"),
    ] = 1000.0
    interactive_rollouts: Annotated[
        int,
        Meta(ge=0, description="so many interactive rollouts at once flush every 50 ms; more flush less often; 0: any"),
    ] = 200
    interactive_slots: Annotated[
        int,
        Meta(
            ge=0,
            description="slots that batch rollouts leave free while people ask a run's policy; at most an eighth",
        ),
    ] = 2
    record_decisions: Annotated[
        str, Meta(description="file for what decisions are handed, and what is decided, to replay them; empty: none")
    ] = ""
    record_decisions_bytes: Annotated[
        int, Meta(ge=1 << 16, description="most bytes of that file; then recording ends, and the coordinator goes on")
    ] = 256 << 20
    keep_ended_s: Annotated[float, Meta(ge=1, description="how long an ended run's record is kept")] = 7 * 86400.0
    keep_ended_bytes: Annotated[
        int, Meta(ge=0, description="bytes of events and timelines that all ended runs keep together")
    ] = 256 << 20
