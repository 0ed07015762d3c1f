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
        str, Meta(description="file that holds the store's password, in place of one in store_url; read at start")
    ] = ""
    store_patience_s: Annotated[
        float, Meta(gt=0, description="seconds that a call waits for an unreachable store before it fails")
    ] = 3.0
    store_boot_s: Annotated[float, Meta(gt=0, description="seconds that a start waits for the store")] = 30.0
    store_replicas: Annotated[
        int, Meta(ge=0, description="number of the store's replicas that must have a write before it is acknowledged")
    ] = 0
    standby: Annotated[
        bool,
        Meta(
            description="wait while another coordinator leads and take over when it is gone; otherwise take over at "
            "once"
        ),
    ] = False
    heartbeat_s: Annotated[float, Meta(gt=0, description="seconds between heartbeats of a worker")] = 1.0
    heartbeat_timeout_s: Annotated[
        float,
        Meta(gt=0, description="seconds of silence after which a worker is lost and its rollouts resume elsewhere"),
    ] = TIMEOUT_S
    reattach_grace_s: Annotated[
        float, Meta(ge=0, description="seconds that attempts wait for a worker whose stream broke")
    ] = 0.0
    recover_grace_s: Annotated[
        float, Meta(ge=0, description="seconds that attempts wait for their workers after the coordinator starts")
    ] = 5.0
    lease_ttl_s: Annotated[
        float, Meta(gt=0, description="seconds without renewal after which a lease may be claimed")
    ] = 10.0
    max_open: Annotated[int, Meta(ge=1, description="maximum queued and running rollouts of a run")] = 65536
    max_runs_per_user: Annotated[
        int,
        Meta(
            ge=1,
            description="maximum live runs of a user, by the name in the token; callers without a name count as one "
            "user",
        ),
    ] = 100
    calls_per_user: Annotated[
        int,
        Meta(ge=0, description="maximum concurrent calls of a user, by the name in the token; further calls wait"),
    ] = 4
    request_kept_s: Annotated[
        float,
        Meta(ge=1, description="seconds to keep finished requests without a session, and ended sessions, of gateways"),
    ] = 600.0
    session_idle_s: Annotated[
        float, Meta(ge=1, description="seconds without use after which a gateway session is dropped")
    ] = 3600.0
    max_stalled_attempts: Annotated[
        int,
        Meta(ge=1, description="consecutive attempts without a new token after which a rollout becomes a dead letter"),
    ] = 5
    rebalance: Annotated[
        bool, Meta(description="move running rollouts between workers where they end sooner that way")
    ] = True
    timeslice_s: Annotated[
        float,
        Meta(gt=0, description="seconds that a run's turn at a worker lasts, or ten times what a change takes"),
    ] = 2.0
    flushes_per_s: Annotated[
        float,
        Meta(
            ge=0,
            description="maximum flushes a second of all workers together; larger fleets flush less often; 0 sets no "
            "limit",
        ),
    ] = 1000.0
    interactive_rollouts: Annotated[
        int,
        Meta(
            ge=0,
            description="interactive rollouts that may flush every 50 ms at once; more of them flush less often; 0 "
            "sets no limit",
        ),
    ] = 200
    interactive_slots: Annotated[
        int,
        Meta(
            ge=0,
            description="slots reserved for interactive requests while people use a run's policy; at most an eighth "
            "of all",
        ),
    ] = 2
    record_decisions: Annotated[
        str,
        Meta(
            description="file to record the inputs and outcomes of decisions to, for replays; an empty string "
            "disables it"
        ),
    ] = ""
    record_decisions_bytes: Annotated[
        int,
        Meta(ge=1 << 16, description="maximum bytes of that file; recording ends there, and the coordinator continues"),
    ] = 256 << 20
    keep_ended_s: Annotated[float, Meta(ge=1, description="seconds to keep the record of an ended run")] = 7 * 86400.0
    keep_ended_bytes: Annotated[
        int, Meta(ge=0, description="maximum bytes of events and timelines of all ended runs together")
    ] = 256 << 20
