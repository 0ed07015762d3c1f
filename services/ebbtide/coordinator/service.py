"""Assembles a coordinator: opens and closes the store, state, loops and servicers in order."""

from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from ebbtide import telemetry
from ebbtide.auth.credential_files import read_file
from ebbtide.coordinator.api import fleet as fleet_wire
from ebbtide.coordinator.api import rollouts as rollouts_wire
from ebbtide.coordinator.api import runs as runs_wire
from ebbtide.coordinator.api import sessions as sessions_wire
from ebbtide.coordinator.api.calls import CoordinatorParts
from ebbtide.coordinator.api.remaining_work import RemainingWorkReader
from ebbtide.coordinator.api.rollouts import RolloutService
from ebbtide.coordinator.api.runs import RunService
from ebbtide.coordinator.api.sessions import RequestRetention, SessionService
from ebbtide.coordinator.append_streams import AppendStreams
from ebbtide.coordinator.attempt_transitions import AttemptTransitions, ClientWrites
from ebbtide.coordinator.dispatch.dispatcher import Dispatcher, watch_lag
from ebbtide.coordinator.election import Election
from ebbtide.coordinator.fleet.flush_intervals import FlushIntervals
from ebbtide.coordinator.fleet.worker_registry import WorkerRegistry
from ebbtide.coordinator.metrics import measure_for_ever
from ebbtide.coordinator.recording import DecidingParts
from ebbtide.coordinator.run_events import RunEventWriter
from ebbtide.coordinator.run_recovery import PublisherKeys, RunRecovery, StoreIncarnations
from ebbtide.coordinator.settings import CoordinatorSettings
from ebbtide.coordinator.state.notifier import Notifier
from ebbtide.coordinator.token_readers import TokenReaders
from ebbtide.errors import StoreUnavailable
from ebbtide.rpc.fair_limiter import end_turn
from ebbtide.rpc.server import Service
from ebbtide.runtime import race
from ebbtide.store.connection import StoreConnection
from ebbtide.store.dialer import with_password
from ebbtide.store.store import ServerInfo, Store
from ebbtide.types.ids import new_fence
from ebbtide.v1.fleet_pb2_grpc import add_FleetServicer_to_server
from ebbtide.v1.rollouts_pb2_grpc import add_RolloutsServicer_to_server
from ebbtide.v1.runs_pb2_grpc import add_RunsServicer_to_server
from ebbtide.v1.sessions_pb2_grpc import add_SessionsServicer_to_server

log = telemetry.get_logger(__name__)


def dialled_url(settings: CoordinatorSettings) -> str:
    """The store's URL, with the password of `store_password_file` in it. Raises `InvalidRequest`."""
    file, field = settings.store_password_file, "store_password_file"
    if not file:
        return settings.store_url
    return with_password(settings.store_url, read_file(file, field).decode(errors="replace").strip(), field=field)


async def _nobody(_serving: bool) -> None:
    pass


class Coordinator:
    """`open`, serve `services`, run `loops`, `leave`, `settle`, `close`. A restart is another coordinator."""

    def __init__(self, settings: CoordinatorSettings, link: StoreConnection | None = None) -> None:
        """`link`: the connection to the store; None: that of the settings."""
        self._settings = settings
        self.link = link or StoreConnection(
            dialled_url(settings), patience_s=settings.store_patience_s, replicas=settings.store_replicas
        )
        self.link.before_wait = end_turn
        self.store = Store(self.link, new_fence())
        self._parts = DecidingParts(settings)
        self.state = self._parts.state
        self.writes = ClientWrites()
        self._notifier = Notifier()
        self._attempts = AttemptTransitions(
            self.state,
            self.store,
            self._notifier,
            self.writes,
            no_progress_limit=settings.max_stalled_attempts,
            keep_ended_s=settings.keep_ended_s,
            keep_ended_bytes=settings.keep_ended_bytes,
        )
        self._run_events = RunEventWriter(self.state, self.store, self._notifier)
        self.fleet = WorkerRegistry(settings, self.state, self._parts.trust, self._run_events)
        self._flushes = FlushIntervals(
            self.state, per_s=settings.flushes_per_s, interactive=settings.interactive_rollouts
        )
        incarnations = StoreIncarnations(self.state, self.store, lease_ttl_s=settings.lease_ttl_s)
        self._incarnations, self._publishers = incarnations, PublisherKeys(self.store)
        self._recovery = RunRecovery(
            self.state, self.store, incarnations, self._attempts.run_over, grace_s=settings.recover_grace_s
        )
        self.rounds = self._parts.new_rounds(self._publishers.public, self._run_events)
        self.dispatcher = Dispatcher(self.state, self.fleet, self._attempts, self._recovery, self.rounds)
        self.leading = Election(self.store)
        self.services = self._services()

    def _services(self) -> list[Service]:
        """The services that it offers once it is open."""
        settings = self._settings
        parts = CoordinatorParts(
            settings,
            self.state,
            self.store,
            self._notifier,
            self.fleet,
            self._attempts,
            self._recovery,
            self._publishers,
            self.writes,
            TokenReaders(self._notifier),
        )
        self.retention = RequestRetention(parts)
        runs, rollouts = RunService(parts), RolloutService(parts, self.retention)
        sessions = SessionService(parts, self.retention)
        appending = AppendStreams(self.state, self.store, self.fleet, self._notifier, parts.readers)
        work = RemainingWorkReader(self.state, self.rounds.speed)
        on_wire = runs_wire.RunsServicer(runs, work, lease_ttl_s=settings.lease_ttl_s)
        fleet = fleet_wire.FleetServicer(self.fleet, appending, self._flushes, heartbeat_s=settings.heartbeat_s)
        return [
            (add_RunsServicer_to_server, on_wire, runs_wire.SERVICE),
            (add_RolloutsServicer_to_server, rollouts_wire.RolloutsServicer(rollouts), rollouts_wire.SERVICE),
            (add_SessionsServicer_to_server, sessions_wire.SessionsServicer(sessions), sessions_wire.SERVICE),
            (add_FleetServicer_to_server, fleet, fleet_wire.SERVICE),
        ]

    async def open(self, address: str = "", *, heard: Callable[[str], None] = lambda _: None) -> list[Service]:
        """Take the store over and load the live runs; a standby first waits until nobody leads. `address`: its own;
        `heard` receives the leader's address meanwhile. Returns the services. Raises `StoreUnavailable`.
        """
        log.info("waiting for the store", at=self.link.where)
        await self.link.open(patience_s=self._settings.store_boot_s)
        _judge(await self.store.server_info(), self.link)
        if self._settings.standby:
            await self.leading.stand_by(address, heard)
        else:
            await self.leading.seize(address)
        # Renewed meanwhile: if reading outlasted the lease, another would take it, and read as long.
        await race(self._take_over(), self.leading.keep(_nobody))
        self.link.watch(self._incarnations.link_opened)
        self.link.durability.listen(self._incarnations.promise_changed)
        self._incarnations.promise_changed()  # while runs were read
        return self.services

    async def _take_over(self) -> None:
        await self._recovery.take_over()
        await self._publishers.keep()

    def loops(self, serving: Callable[[bool], Awaitable[None]] = _nobody) -> dict[str, Coroutine[Any, Any, None]]:
        """The background loops, which raise `TermSuperseded` if superseded. `serving`: see `Election.keep`."""
        return {
            "decide": self.dispatcher.decide_for_ever(),
            "watch": self.dispatcher.watch_for_ever(),
            "reap": self.dispatcher.reap_for_ever(),
            "expire": self.retention.expire_for_ever(),
            "flushes": self._flushes.pace_for_ever(),
            "term": self.leading.keep(serving),
            "store": self.link.lost(),
            "measure": measure_for_ever(self.state, self.store),
            "lag": watch_lag(self.state),
        }

    def leave(self) -> None:
        """See `WorkerRegistry.leave`."""
        self.fleet.leave()

    async def settle(self) -> None:
        """Finish the writes that clients began, before the lease is released. Call when no call and no loop runs."""
        await self._recovery.close()
        await self.writes.settle(self._settings.store_patience_s)

    async def close(self) -> None:
        await self.writes.close()
        await self._recovery.close()
        await self.fleet.close()
        await self._run_events.close()
        await self.link.close()
        self._parts.close()


def _judge(condition: ServerInfo, link: StoreConnection) -> None:
    """Warn of what the store does not guarantee. Raises `StoreUnavailable` if a restart would wipe its replicas."""
    log.info("store", version=condition.version, fsync=condition.fsync, durable_after_s=condition.durable_after_s)
    if condition.wipes:
        raise StoreUnavailable(
            f"the store at {link.where} has replicas and keeps nothing on disk: started again, it would be empty and "
            "wipe them; turn on appendonly, with appendfsync always"
        )
    if condition.fsync in {"off", "no"}:
        log.warning("the store's restart may lose what was acknowledged: turn on appendonly, with appendfsync always")
    if condition.skips_fsync:
        log.warning("the store syncs nothing while it rewrites its file: set no-appendfsync-on-rewrite to no")
    if condition.promotes:
        log.warning("a failover may lose what was acknowledged last, until it is sent again: raise store_replicas")
    if condition.evicts:
        log.warning("the store evicts keys when it is full, rollouts among them: set maxmemory-policy to noeviction")
