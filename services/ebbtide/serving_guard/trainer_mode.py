"""The mode of a trainer's device: the trainer computes its steps there, and between them the device is lent."""

import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, Final

from ebbtide.loans.borrower_table import BorrowerTable
from ebbtide.loans.grant_issuer import GrantIssuer
from ebbtide.scheduling.elastic.device_ownership import DeviceOwnership
from ebbtide.serving_guard.lender import Lender
from ebbtide.serving_guard.settings import GuardSettings
from ebbtide.serving_guard.trainer.borrower_memory import PhasedMemory
from ebbtide.serving_guard.trainer.device_report import DeviceReporter
from ebbtide.serving_guard.trainer.lease_record import LeaseRecord
from ebbtide.serving_guard.trainer.loan_keeper import LoanKeeper
from ebbtide.serving_guard.trainer.owner_stream import OwnerStream
from ebbtide.serving_guard.trainer.return_watch import ReturnWatch
from ebbtide.serving_guard.trainer.servicer import LOANS, LoanServicer
from ebbtide.v1.loans_pb2_grpc import add_LoansServicer_to_server

#: An owner whose stream broke reconnects within so long unless it is gone.
REJOIN_S: Final = 1.0


class TrainerMode(Lender):
    """Connects the parts. Trainer and workers connect at its address."""

    _keeper: LoanKeeper

    def __init__(self, settings: GuardSettings) -> None:
        folder, own = Path(settings.grant_dir), settings.trainer
        record = LeaseRecord(folder)
        ownership = DeviceOwnership(
            time.monotonic(),
            settle_s=own.settle_s,
            silent_s=own.silent_s,
            rejoin_s=REJOIN_S,
            remembered=record.read(),
        )
        memory = PhasedMemory(own.residency, lambda: self._keeper.granting)
        borrowers = BorrowerTable(folder, memory)
        returns = ReturnWatch(folder, borrowers, own.residency)
        keeper = LoanKeeper(ownership, borrowers, returns, memory_s=own.memory_s)
        issuer = GrantIssuer(borrowers, memory=memory.allowed, forecast=keeper.forecast)
        report = DeviceReporter(ownership, keeper, borrowers, issuer)
        owners = OwnerStream(ownership, keeper, engine_bytes=memory.engine_bytes, record=record.write)
        loans = (add_LoansServicer_to_server, LoanServicer(owners, report), LOANS)
        super().__init__(settings, borrowers, keeper, issuer, report.as_guard, [loans])

    def _work(self) -> dict[str, Coroutine[Any, Any, None]]:
        return super()._work() | {"loans": self._keeper.run()}
