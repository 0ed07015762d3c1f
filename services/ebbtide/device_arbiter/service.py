"""Runs the whole arbiter: the socket of trainer and workers, the keeper of loans and the enforcer."""

import time
from pathlib import Path
from typing import Final

from ebbtide.auth.security import ServerSettings
from ebbtide.device_arbiter import metrics
from ebbtide.device_arbiter.borrower_memory import PhasedMemory
from ebbtide.device_arbiter.device_report import DeviceReporter
from ebbtide.device_arbiter.lease_record import LeaseRecord
from ebbtide.device_arbiter.loan_keeper import LoanKeeper
from ebbtide.device_arbiter.owner_stream import OwnerStream
from ebbtide.device_arbiter.return_watch import ReturnWatch
from ebbtide.device_arbiter.servicer import LOANS, LoanServicer
from ebbtide.device_arbiter.settings import ArbiterSettings
from ebbtide.grants import locked_folder, socket_path
from ebbtide.loans.borrower_table import BorrowerTable
from ebbtide.loans.enforcer import Enforcer
from ebbtide.loans.grant_issuer import GrantIssuer
from ebbtide.loans.grant_stream import GrantStream
from ebbtide.loans.servicer import GRANTS, GrantServicer
from ebbtide.rpc.server import Server, Service
from ebbtide.runtime import Shutdown
from ebbtide.scheduling.elastic.device_ownership import DeviceOwnership
from ebbtide.telemetry import rpc_observer
from ebbtide.v1.grants_pb2_grpc import add_GrantsServicer_to_server
from ebbtide.v1.loans_pb2_grpc import add_LoansServicer_to_server

#: An owner whose stream broke reconnects within so long unless it is gone.
_REJOIN_S: Final = 1.0
#: Streams end at once, with `Draining`; no other call is worth waiting for.
_GRACE_S: Final = 0.5


async def serve(shutdown: Shutdown, settings: ArbiterSettings) -> None:
    """Arbitrate one device until `shutdown` is requested."""
    with locked_folder(Path(settings.grant_dir)):
        arbiter = DeviceArbiter(settings)
        await arbiter.start(shutdown)
        shutdown.ready(arbiter.address)
        await shutdown.requested.wait()
        await arbiter.stop()


class DeviceArbiter:
    """Connects the parts of the arbiter. It is started once."""

    def __init__(self, settings: ArbiterSettings) -> None:
        folder, held = Path(settings.grant_dir), settings.residency
        record = LeaseRecord(folder)
        ownership = DeviceOwnership(
            time.monotonic(),
            settle_s=settings.settle_s,
            silent_s=settings.silent_s,
            rejoin_s=_REJOIN_S,
            remembered=record.read(),
        )
        memory = PhasedMemory(held, lambda: self._keeper.lent)
        self._borrowers = BorrowerTable(folder, memory, metrics.LOANS)
        returns = ReturnWatch(folder, self._borrowers, held)
        self._keeper = keeper = LoanKeeper(ownership, self._borrowers, returns, memory_s=settings.memory_s)
        self._enforcer = Enforcer(
            self._borrowers,
            yield_s=settings.yield_ms / 1000,
            kill_s=settings.kill_s,
            most=settings.max_stops,
            predicted_s=lambda: keeper.step_s,
            granting=lambda: keeper.lent,
        )
        issuer = GrantIssuer(self._borrowers, memory=memory.allowed, forecast=keeper.forecast)
        report = DeviceReporter(ownership, keeper, self._borrowers, issuer)
        owners = OwnerStream(ownership, keeper, engine_bytes=memory.engine_bytes, record=record.write)
        tenants = GrantServicer(GrantStream(self._borrowers, issuer), report.as_guard)  # to engines this is a guard
        self.services: list[Service] = [
            (add_GrantsServicer_to_server, tenants, GRANTS),
            (add_LoansServicer_to_server, LoanServicer(owners, report), LOANS),
        ]
        self.address = f"unix:{socket_path(folder).absolute()}"  # where trainer and workers connect

    async def start(self, shutdown: Shutdown) -> None:
        self._keeper.review()
        self._server = Server(ServerSettings.at(self.address), self.services, observe=rpc_observer(), private=True)
        await self._server.start()
        shutdown.spawn(self._enforcer.run(), "enforcer")
        shutdown.spawn(self._keeper.run(), "loans")
        await self._server.set_serving(True)

    async def stop(self) -> None:
        """End grants first: the trainer has its device to itself while no arbiter runs."""
        self._borrowers.close()
        self._keeper.close()
        self._enforcer.close()
        await self._server.stop(_GRACE_S)
