"""What a worker tells its guard before its engine boots, and when it boots. The guard is played by the test."""

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from ebbtide.errors import InvalidRequest, Superseded
from ebbtide.grants import page_path
from ebbtide.rollout_worker.boot_loan import BootLoan
from ebbtide.rollout_worker.engine.vllm.borrowed_engine import BorrowedEngine
from ebbtide.rollout_worker.engine.vllm.vllm_engine import _extra
from ebbtide.types.grants import BorrowerReport, Grant, Residency
from ebbtide.v1 import grants_pb2
from ebbtide.wire import from_proto, to_proto
from tests.support.waiting import wait_until


class Guard:
    """One stream after another, as a stub gives them: what came in, and grants to send or errors to end with."""

    def __init__(self) -> None:
        self.streams = 0
        self.reports: list[BorrowerReport] = []
        self.sending: asyncio.Queue[Grant | Exception] = asyncio.Queue()

    def Borrow(self) -> "Guard":
        self.streams += 1
        return self

    async def write(self, message: Any) -> None:
        if message.WhichOneof("kind") == "report":
            self.reports.append(from_proto(message.report, BorrowerReport))

    async def __aiter__(self) -> AsyncIterator[Any]:
        while True:
            sent = await self.sending.get()
            if isinstance(sent, Exception):
                raise sent
            yield to_proto(sent, grants_pb2.Grant)

    def cancel(self) -> None:
        pass

    def grant(self, sequence: int, at: Residency) -> None:
        self.sending.put_nowait(Grant(sequence=sequence, residency=at))


class Worker:
    def __init__(self, folder: Path) -> None:
        self.engine, self.guard = BorrowedEngine(page_path(folder, "w"), 64), Guard()
        self.loan = BootLoan(self.guard, "the guard", self.engine, worker_id="w")  # type: ignore[arg-type]
        self.running: asyncio.Task[None] | None = None
        self.permission: asyncio.Task[None] | None = None

    def announce(self) -> None:
        self.running = asyncio.create_task(self.loan.run())
        self.permission = asyncio.create_task(self.loan.permission())


@pytest.fixture
async def worker(tmp_path: Path) -> AsyncIterator[Worker]:
    made = Worker(tmp_path)
    yield made
    for task in (made.running, made.permission):
        if task is not None:
            task.cancel()
    made.engine.close()


async def test_a_step_in_which_a_former_engine_was_killed_is_over_before_the_guard_looks(worker: Worker) -> None:
    page = worker.engine.page
    page.enter(os.getpid(), 8)
    page.begin_step(heeding=False)
    worker.announce()
    await wait_until(lambda: worker.guard.reports)
    assert not page.steps().stepping
    assert page.steps().pid == 0


async def test_a_worker_answers_its_first_grant_and_each_other_wish_at_once(worker: Worker) -> None:
    worker.announce()
    await wait_until(lambda: worker.guard.reports)
    worker.guard.grant(1, Residency.AWAY)
    await wait_until(lambda: worker.guard.reports[-1].grant == 1, 0.35)
    worker.guard.grant(2, Residency.AWAKE)
    await wait_until(lambda: worker.guard.reports[-1].grant == 2, 0.35)
    assert worker.guard.reports[-1].moving
    worker.guard.grant(3, Residency.AWAY)
    await wait_until(lambda: worker.guard.reports[-1].grant == 3, 0.35)
    assert worker.guard.reports[-1].moving, "a boot does not turn back"


async def test_a_worker_whose_id_another_one_has_goes_on_waiting_until_it_is_permitted(worker: Worker) -> None:
    worker.announce()
    await wait_until(lambda: worker.guard.reports)
    worker.guard.sending.put_nowait(Superseded("the worker connected again"))
    await wait_until(lambda: worker.guard.streams == 2)
    worker.guard.grant(1, Residency.AWAKE)
    assert worker.permission is not None
    await asyncio.wait_for(worker.permission, 5.0)


async def test_an_announcement_lasts_until_the_booted_engine_has_a_stream_of_its_own(worker: Worker) -> None:
    worker.announce()
    worker.guard.grant(1, Residency.AWAKE)
    assert worker.permission is not None
    await asyncio.wait_for(worker.permission, 5.0)
    succession = asyncio.create_task(worker.loan.succeeded())
    done, _ = await asyncio.wait({succession}, timeout=0.1)
    assert not done
    worker.guard.sending.put_nowait(Superseded("the worker connected again"))
    await asyncio.wait_for(succession, 1.0)


def test_an_interval_that_would_hold_all_tokens_back_is_refused_by_name() -> None:
    with pytest.raises(InvalidRequest, match="stream_interval") as refused:
        _extra('{"stream_interval": 4}')
    assert refused.value.field == "vllm.engine_args"
