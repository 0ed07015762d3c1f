"""A reader gets each stored token once and in order, from the append as long as it keeps up, else from the store."""

import asyncio
import random
from collections.abc import AsyncIterator

import pytest

from ebbtide.append_stream import AppendAck, AppendColumns
from ebbtide.coordinator import token_readers
from ebbtide.coordinator.state.notifier import Notifier
from ebbtide.coordinator.token_readers import WAITING_TOKENS, TokenReader, TokenReaders
from ebbtide.errors import NotFound
from ebbtide.types.fleet import AppendStatus
from ebbtide.types.rollout import FinishReason, TokenChunk
from ebbtide.types.tokens import TOKEN_BYTES, pack_tokens, token_count, unpack_tokens
from tests.support.waiting import wait_until

STOP, CANCELLED = FinishReason.STOP, FinishReason.CANCELLED


def records(begin: int, end: int) -> bytes:
    """Tokens whose ids say where they belong."""
    return pack_tokens(range(begin, end), [-0.5] * (end - begin), 1)


class Rollout:
    """A rollout as the store has it, and the appends that bring its tokens."""

    def __init__(self) -> None:
        self.notifier = Notifier()
        self.readers = TokenReaders(self.notifier)
        self.tokens = b""
        self.reason: FinishReason | None = None
        self.gone = False
        self.reads: list[int] = []  # offsets from which the store was read
        self.answers = asyncio.Event()  # the store answers reads
        self.answers.set()

    async def read(self, offset: int) -> TokenChunk:
        self.reads.append(offset)
        await self.answers.wait()
        if self.gone:
            raise NotFound("gone")
        return TokenChunk(offset=offset, tokens=self.tokens[offset * TOKEN_BYTES :], reason=self.reason)

    def add(self, count: int, finish: FinishReason | None = None) -> None:
        """Store and hand out so many new tokens, between those of other rollouts."""
        begin, end = token_count(self.tokens), token_count(self.tokens) + count
        self.tokens, self.reason = self.tokens + records(begin, end), finish
        finishes = {1: finish} if finish else {}
        self.push(end, count, finishes)

    def push(self, end: int, count: int, finishes: dict[int, FinishReason] | None = None) -> None:
        data = records(70, 72) + records(end - count, end) + records(80, 81)
        names, counts = ["before", "r", "after"], [2, count, 1]
        deltas = AppendColumns("run", names, ["a", "b", "c"], [72, end, 81], counts, data, finishes or {})
        self.readers.push(deltas, {})

    def refuse(self, status: AppendStatus) -> None:
        """The store did not take what an attempt sent."""
        deltas = AppendColumns("run", ["r"], ["old"], [99], [9], records(90, 99), {0: STOP})
        self.readers.push(deltas, {0: AppendAck("old", status, token_count(self.tokens), False)})


class Reading:
    """What one reader was given. It can be held up."""

    def __init__(self, rollout: Rollout, offset: int = 0) -> None:
        self._rollout, self._offset = rollout, offset
        self.chunks: list[TokenChunk] = []
        self.goes_on = asyncio.Event()
        self.goes_on.set()
        self.reader = TokenReader()
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        with self._rollout.readers.reading("run", "r") as self.reader:
            async for chunk in self.reader.follow(self._offset, self._rollout.read):
                self.chunks.append(chunk)
                await self.goes_on.wait()

    @property
    def ids(self) -> list[int]:
        return [int(token) for chunk in self.chunks for token in unpack_tokens(chunk.tokens)["id"]]

    @property
    def whole(self) -> bool:
        """Whether each chunk begins where the one before ended."""
        ends = [self._offset, *(chunk.offset + token_count(chunk.tokens) for chunk in self.chunks)]
        return [chunk.offset for chunk in self.chunks] == ends[:-1]

    async def has(self, tokens: int) -> None:
        await wait_until(lambda: len(self.ids) >= tokens, what=f"{tokens} tokens")
        assert self.whole
        assert self.ids == list(range(self._offset, self._offset + tokens))

    async def ended(self) -> FinishReason | None:
        await asyncio.wait_for(self.task, 5)
        assert self.whole
        return self.chunks[-1].reason

    async def waits(self) -> None:
        """Wait until it has taken all that there is for it, without a timer."""
        for _ in range(10):
            await asyncio.sleep(0)


@pytest.fixture
async def rollout() -> Rollout:
    return Rollout()


@pytest.fixture
async def reading(rollout: Rollout) -> AsyncIterator[Reading]:
    """A reader from the first token on, that waits for it."""
    made = Reading(rollout)
    await made.waits()
    assert rollout.reads == [0]
    yield made
    made.task.cancel()
    await asyncio.gather(made.task, return_exceptions=True)
    assert rollout.readers._readers == {}


async def test_a_reader_that_keeps_up_is_served_without_reading_the_store(rollout: Rollout, reading: Reading) -> None:
    for number in range(1, 6):
        rollout.add(2)
        await reading.has(2 * number)
    rollout.add(1, STOP)
    assert await reading.ended() is STOP
    assert reading.ids == list(range(11))
    assert rollout.reads == [0], "it looked once, before the first token was there"


async def test_what_is_pushed_while_a_reader_is_busy_comes_in_one_chunk(rollout: Rollout, reading: Reading) -> None:
    reading.goes_on.clear()
    rollout.add(1)
    await reading.has(1)
    for _ in range(5):
        rollout.add(2)
    reading.goes_on.set()
    await reading.has(11)
    assert [token_count(chunk.tokens) for chunk in reading.chunks] == [1, 10]
    assert rollout.reads == [0]


async def test_a_finish_without_tokens_is_pushed_too(rollout: Rollout, reading: Reading) -> None:
    rollout.add(3)
    await reading.has(3)
    rollout.add(0, STOP)
    assert await reading.ended() is STOP
    assert rollout.reads == [0]


async def test_a_late_reader_is_served_from_the_store_and_then_joins_the_others(
    rollout: Rollout, reading: Reading
) -> None:
    rollout.add(50)
    await reading.has(50)
    late = Reading(rollout, offset=10)
    await late.has(40)
    await late.waits()
    reads = len(rollout.reads)
    rollout.add(5)
    await late.has(45)
    await reading.has(55)
    rollout.add(5, STOP)
    assert await late.ended() is await reading.ended() is STOP
    assert late.ids == list(range(10, 60))
    assert len(rollout.reads) == reads


async def test_tokens_that_are_pushed_while_the_store_is_read_come_neither_twice_nor_too_late(
    rollout: Rollout,
) -> None:
    rollout.add(20)
    rollout.answers.clear()
    late = Reading(rollout)
    await late.waits()
    rollout.add(5)  # the store's answer has these already
    rollout.answers.set()
    await late.has(25)
    rollout.add(5, STOP)
    assert await late.ended() is STOP
    assert late.ids == list(range(30))
    assert rollout.reads == [0], "what was pushed meanwhile says that there is no more in the store"


async def test_a_slow_reader_holds_a_bounded_number_of_tokens_and_catches_up_from_the_store(
    rollout: Rollout, reading: Reading
) -> None:
    reading.goes_on.clear()
    rollout.add(1)
    await reading.has(1)
    most = 0
    for _ in range(100):
        rollout.add(WAITING_TOKENS // 10)
        most = max(most, len(reading.reader._tokens) // TOKEN_BYTES)
    assert most <= WAITING_TOKENS
    reading.goes_on.set()
    await reading.has(1 + 100 * (WAITING_TOKENS // 10))
    await reading.waits()
    reads = len(rollout.reads)
    rollout.add(1, STOP)
    assert await reading.ended() is STOP
    assert len(rollout.reads) == reads, "it has joined again"


async def test_what_a_superseded_attempt_sends_is_not_shown(rollout: Rollout, reading: Reading) -> None:
    rollout.add(4)
    await reading.has(4)
    rollout.refuse(AppendStatus.SUPERSEDED)
    await reading.waits()
    assert len(reading.chunks) == 1
    rollout.add(2, STOP)
    assert await reading.ended() is STOP
    assert reading.ids == list(range(6))


async def test_an_attempt_at_another_worker_goes_on_in_the_same_stream(rollout: Rollout, reading: Reading) -> None:
    rollout.add(4)
    await reading.has(4)
    rollout.refuse(AppendStatus.GAP)  # the killed worker's last message came behind a lost one
    rollout.add(3)  # the next worker's first tokens
    await reading.has(7)
    assert reading.ids == list(range(7))


@pytest.mark.parametrize("finish", [None, STOP])
async def test_a_store_that_forgot_tokens_is_sent_them_again_and_the_reader_gets_none_twice(
    rollout: Rollout, reading: Reading, finish: FinishReason | None
) -> None:
    rollout.add(10)
    await reading.has(10)
    rollout.tokens = rollout.tokens[: 6 * TOKEN_BYTES]
    rollout.add(3)  # behind what the reader has
    await reading.waits()
    assert len(reading.chunks) == 1
    rollout.add(5, finish)
    await reading.has(14)
    assert [chunk.offset for chunk in reading.chunks] == [0, 10]
    assert reading.chunks[-1].reason is finish


async def test_tokens_that_wait_when_the_store_forgets_are_replaced_by_what_it_is_sent_again(
    rollout: Rollout, reading: Reading
) -> None:
    reading.goes_on.clear()
    rollout.add(2)
    await reading.has(2)
    rollout.add(6)
    rollout.tokens = rollout.tokens[: 4 * TOKEN_BYTES]
    rollout.add(1)
    rollout.add(4)
    reading.goes_on.set()
    await reading.has(9)
    assert rollout.reads == [0, 2], "the store was asked what is before the tokens that came again"


async def test_a_cancelled_rollout_ends_its_readers_though_no_worker_says_so(
    rollout: Rollout, reading: Reading
) -> None:
    rollout.add(2)
    await reading.has(2)
    rollout.add(1)
    rollout.reason = CANCELLED  # in the same moment
    rollout.notifier.notify("tokens", "run", "r")
    assert await reading.ended() is CANCELLED
    assert reading.ids == [0, 1, 2]


async def test_a_rollout_that_was_deleted_ends_its_readers(rollout: Rollout, reading: Reading) -> None:
    rollout.gone = True
    rollout.notifier.notify("tokens", "run", "r")
    with pytest.raises(NotFound):
        await reading.task


async def test_a_lost_notification_costs_a_pause_and_no_token(
    rollout: Rollout, reading: Reading, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ebbtide.coordinator.state.notifier._LOOK_AGAIN_S", 0.01)
    rollout.add(2)
    await reading.has(2)
    rollout.tokens, rollout.reason = rollout.tokens + records(2, 4), STOP  # nobody hears of it
    assert await reading.ended() is STOP
    assert reading.ids == [0, 1, 2, 3]


async def test_appends_cost_nothing_while_nobody_reads_their_run(rollout: Rollout) -> None:
    class Untouched(AppendColumns):
        @property
        def rollouts(self) -> list[str]:
            raise AssertionError("the deltas were looked at")

    rollout.readers.push(Untouched("run", ["r"], ["a"], [1], [1], records(0, 1), {}), {})


def toggle(event: asyncio.Event) -> None:
    (event.clear if event.is_set() else event.set)()


def happen(draw: random.Random, rollout: Rollout, readings: list[Reading]) -> None:
    """Something happens to the rollout, its store or its readers; mostly tokens are stored."""
    stored = token_count(rollout.tokens)
    match draw.randrange(12):
        case 0:
            rollout.refuse(draw.choice((AppendStatus.GAP, AppendStatus.SUPERSEDED)))
        case 1:  # the store forgets
            rollout.tokens = rollout.tokens[: draw.randint(max(0, stored - 6), stored) * TOKEN_BYTES]
        case 2:  # an attempt asks what is stored
            rollout.push(stored, 0)
        case 3:
            readings.append(Reading(rollout))
        case 4:
            toggle(draw.choice(readings).goes_on)
        case 5:
            toggle(rollout.answers)
        case _:
            rollout.add(draw.randrange(4))


@pytest.mark.parametrize("seed", range(30))
async def test_whatever_happens_a_reader_gets_what_the_store_has_each_token_once(
    rollout: Rollout, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(token_readers, "WAITING_TOKENS", 12)
    monkeypatch.setattr("ebbtide.coordinator.state.notifier._LOOK_AGAIN_S", 0.005)
    draw = random.Random(seed)
    readings = [Reading(rollout)]
    for _ in range(150):
        happen(draw, rollout, readings)
        for _ in range(draw.randrange(4)):
            await asyncio.sleep(0)
    for event in (rollout.answers, *(one.goes_on for one in readings)):
        event.set()
    rollout.add(150 * 6, STOP)  # more than the store can have forgotten
    for one in readings:
        assert await one.ended() is STOP
        assert one.ids == list(range(token_count(rollout.tokens)))
