"""A coordinator put together: store, state, loops and servicers, in the order in which they come up and go down."""

from collections.abc import Coroutine
from typing import Any

from ebbtide import telemetry
from ebbtide.coordinator.appending import Appending
from ebbtide.coordinator.attempts import Attempts
from ebbtide.coordinator.bells import Bells
from ebbtide.coordinator.dispatcher import Dispatcher
from ebbtide.coordinator.fleet import Fleet
from ebbtide.coordinator.parts import Parts
from ebbtide.coordinator.recovery import Recovery
from ebbtide.coordinator.rollouts import RolloutService
from ebbtide.coordinator.runs import RunService
from ebbtide.coordinator.servicers import fleet as fleet_wire
from ebbtide.coordinator.servicers import rollouts as rollouts_wire
from ebbtide.coordinator.servicers import runs as runs_wire
from ebbtide.coordinator.settings import Settings
from ebbtide.coordinator.state import State
from ebbtide.rpc.server import Service
from ebbtide.store.connection import Connection
from ebbtide.store.faults import TermSuperseded
from ebbtide.store.store import Condition, Store
from ebbtide.types.ids import new_fence
from ebbtide.v1.fleet_pb2_grpc import add_FleetServicer_to_server
from ebbtide.v1.rollouts_pb2_grpc import add_RolloutsServicer_to_server
from ebbtide.v1.runs_pb2_grpc import add_RunsServicer_to_server

log = telemetry.get_logger(__name__)


class Coordinator:
    """`open`, serve what it returns, run `loops`, `leave`, `close`. A restart is another coordinator."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.link = Connection(settings.store_url, patience_s=settings.store_patience_s)
        self.store = Store(self.link, new_fence())
        self.state = State()
        self._bells = Bells()
        self._attempts = Attempts(
            self.state,
            self.store,
            self._bells,
            barren_limit=settings.barren_attempts,
            keep_ended_s=settings.keep_ended_s,
        )
        self.fleet = Fleet(settings, self.state, self.store, self._attempts, self._bells)

    async def open(self) -> list[Service]:
        """Take the store over and load the live runs. Returns the services. Raises `StoreUnavailable`."""
        settings = self._settings
        log.info("waiting for the store", at=self.link.where)
        await self.link.open(patience_s=settings.store_boot_s)
        condition = await self.store.condition()
        _warn(condition)
        recovery = Recovery(self.state, self.store, grace_s=settings.recover_grace_s)
        await recovery.take_over()
        self.link.on_link = self._link_came
        self.dispatcher = Dispatcher(self.state, self.fleet, self._attempts, recovery, slice_s=settings.slice_s)
        parts = Parts(settings, self.state, self.store, self._bells, self.fleet, self._attempts, recovery)
        runs, rollouts = RunService(parts), RolloutService(parts)
        appending = Appending(self.state, self.store, self.fleet, self._bells, fsync=condition.fsync)
        on_wire = runs_wire.RunsServicer(runs, lease_ttl_s=settings.lease_ttl_s)
        fleet = fleet_wire.FleetServicer(self.fleet, appending, heartbeat_s=settings.heartbeat_s)
        return [
            (add_RunsServicer_to_server, on_wire, runs_wire.SERVICE),
            (add_RolloutsServicer_to_server, rollouts_wire.RolloutsServicer(rollouts), rollouts_wire.SERVICE),
            (add_FleetServicer_to_server, fleet, fleet_wire.SERVICE),
        ]

    def loops(self) -> dict[str, Coroutine[Any, Any, None]]:
        """What runs beside the server, by name. Each raises `TermSuperseded` when another coordinator has the store."""
        return {
            "decide": self.dispatcher.decide_for_ever(),
            "watch": self.dispatcher.watch_for_ever(),
            "term": self._superseded(),
            "store": self.link.lost(),
        }

    async def _superseded(self) -> None:
        await self.link.superseded.wait()
        raise TermSuperseded

    def _link_came(self) -> None:
        """Calls that the last link took with it may or may not have been done: look."""
        for run in self.state.runs.values():
            run.stale = True
        self.state.wake.set()

    def leave(self) -> None:
        """From here on broken streams are our own doing, and workers keep their attempts."""
        self.fleet.leaving = True

    async def close(self) -> None:
        await self.fleet.close()
        await self.link.close()


def _warn(condition: Condition) -> None:
    log.info("store", version=condition.version, fsync=condition.fsync)
    if condition.fsync in {"off", "no"}:
        log.warning("the store's restart may lose what was acknowledged: turn on appendonly, with appendfsync always")
    if condition.evicts:
        log.warning("the store evicts keys when it is full, rollouts among them: set maxmemory-policy to noeviction")
