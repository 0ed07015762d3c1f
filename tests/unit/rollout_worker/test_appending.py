"""The append stream keeps tokens flowing while answers are late, and pairs each answer with its message."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from functools import partial
from typing import Any

import pytest

from ebbtide.append_stream import AppendAck
from ebbtide.rollout_worker.generation.outbox import Outbox, OutboxMessage
from ebbtide.rollout_worker.streams import _IN_FLIGHT, AppendClient
from ebbtide.rpc.status_table import translated
from ebbtide.types.fleet import AttemptRef
from ebbtide.types.rollout import FinishReason
from ebbtide.types.tokens import TOKEN_BYTES
from ebbtide.v1 import fleet_pb2
from tests.support.waiting import wait_until

REF = AttemptRef("run", "rollout", "a")


class Call:
    """A stream of which the test is the other end."""

    def __init__(self) -> None:
        self.sent: list[fleet_pb2.AppendRequest] = []
        self.answers: asyncio.Queue[fleet_pb2.AppendResponse | None] = asyncio.Queue()

    async def write(self, message: fleet_pb2.AppendRequest) -> None:
        self.sent.append(message)

    async def __aiter__(self) -> AsyncIterator[fleet_pb2.AppendResponse]:
        while (answer := await self.answers.get()) is not None:
            yield answer

    def cancel(self) -> None: ...

    def add_done_callback(self, _: Callable[[Any], None]) -> None: ...

    def answer(self, message: int, *, durable: bool = True, **other: Any) -> None:
        sequence = self.sent[message].sequence
        others = [fleet_pb2.AppendAck(**other)] if other else []
        self.answers.put_nowait(fleet_pb2.AppendResponse(sequence=sequence, durable=durable, others=others))


class Worker:
    """An outbox with one attempt, and its appender."""

    def __init__(self) -> None:
        self.outbox = Outbox(flush_tokens=1, flush_interval_s=0.01)
        self.outbox.open(REF, b"")
        self.due = asyncio.Event()
        self.calls: list[Call] = []
        self.settled: list[tuple[list[AppendAck], bool]] = []
        appender = AppendClient(self, partial(translated, "coordinator", "here"), self.outbox, self)  # type: ignore[arg-type]
        self.task = asyncio.create_task(appender.run("s"))

    def Append(self) -> Call:
        self.calls.append(Call())
        return self.calls[-1]

    async def message(self) -> OutboxMessage:
        return self.outbox.take(asyncio.get_running_loop().time())

    def settle(self, acks: Iterable[AppendAck], *, durable: bool) -> None:
        self.settled.append((list(acks), durable))
        self.outbox.settle(self.settled[-1][0], durable=durable, now=asyncio.get_running_loop().time())

    async def generate(self, *, finish: bool = False) -> None:
        """One token, and wait until it is on its way, or may not be yet."""
        now = asyncio.get_running_loop().time()
        self.outbox.append("a", bytes(TOKEN_BYTES), now)
        if finish:
            self.outbox.finish("a", FinishReason.STOP, now)
        self.due.set()
        for _ in range(5):
            await asyncio.sleep(0)

    async def sent(self, count: int, call: int = 0) -> Call:
        """The stream, once so many messages went over it; the one that opens it, and what it asks for, left out."""
        await wait_until(lambda: len(self.calls) > call and len(self.calls[call].sent) >= count)
        return self.calls[call]


@pytest.fixture
async def worker() -> AsyncIterator[Worker]:
    made = Worker()
    await made.sent(2)  # the session, and the question what the store has
    made.calls[0].answer(1)
    await wait_until(lambda: made.settled)
    yield made
    made.task.cancel()
    await asyncio.gather(made.task, return_exceptions=True)


async def test_tokens_go_out_while_earlier_ones_are_unanswered_up_to_a_bound(worker: Worker) -> None:
    for _ in range(_IN_FLIGHT):
        before = len(worker.calls[0].sent)
        await worker.generate()
        await worker.sent(before + 1)
    for _ in range(5):
        await worker.generate()
    call = await worker.sent(2 + _IN_FLIGHT)
    assert [list(message.offsets) for message in call.sent[2:]] == [[at] for at in range(_IN_FLIGHT)]
    call.answer(2)
    await worker.sent(3 + _IN_FLIGHT)
    assert (list(call.sent[-1].offsets), list(call.sent[-1].counts)) == ([_IN_FLIGHT], [5]), "what waited goes at once"


async def test_a_gap_is_filled_once_though_its_followers_are_refused_too(worker: Worker) -> None:
    for count in range(3, 6):
        await worker.generate()
        await worker.sent(count)
    call = worker.calls[0]
    for index in (2, 3, 4):
        call.answer(index, index=0, status=2, stored=0)
    await wait_until(lambda: len(worker.settled) == 4)
    call = await worker.sent(6)
    assert (list(call.sent[5].offsets), list(call.sent[5].counts)) == ([0], [3])
    call.answer(5)
    await wait_until(lambda: worker.outbox.unacknowledged == 0)
    assert len(call.sent) == 6


async def test_a_finish_leaves_when_its_second_answer_says_that_it_is_durable(worker: Worker) -> None:
    await worker.generate(finish=True)
    call = await worker.sent(3)
    call.answer(2, durable=False)
    await wait_until(lambda: len(worker.settled) == 2)
    assert "a" in worker.outbox
    call.answer(2, durable=True)
    await wait_until(lambda: "a" not in worker.outbox)


async def test_a_new_stream_begins_with_what_was_not_acknowledged_under_new_numbers(worker: Worker) -> None:
    await worker.generate()
    await worker.sent(3)
    worker.calls[0].answers.put_nowait(None)
    call = await worker.sent(2, call=1)
    assert call.sent[0].session == "s"
    assert call.sent[1].opened[0].attempt.attempt_id == "a"
    assert (list(call.sent[1].offsets), list(call.sent[1].counts)) == ([0], [1])
