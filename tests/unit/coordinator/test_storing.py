"""Messages of one run share calls of the store, and each gets its own answer."""

import asyncio
import math
import time
from types import SimpleNamespace
from typing import Any

import pytest

from ebbtide.append_stream import AppendAck, AppendColumns, joined
from ebbtide.coordinator.append_streams import AppendBatcher, FoundAttempts
from ebbtide.coordinator.state.coordinator_state import CoordinatorState
from ebbtide.coordinator.state.notifier import Notifier
from ebbtide.coordinator.state.worker_reports import AttachReport
from ebbtide.coordinator.token_readers import TokenReaders
from ebbtide.errors import Internal, StoreUnavailable
from ebbtide.types.fleet import PROTOCOL_VERSION, AppendStatus, EngineInfo, WorkerKind
from ebbtide.types.rollout import FinishReason, TokenChunk
from ebbtide.types.run import EnvironmentSpec, RunSpec
from ebbtide.types.tokens import TOKEN_BYTES
from tests.support.waiting import wait_until


class Store:
    """Answers a call when it is let go, refuses rollouts named `gap`, and raises what it is told to."""

    def __init__(self) -> None:
        self.calls: list[AppendColumns] = []
        self.go = asyncio.Event()
        self.go.set()
        self.errors: list[Exception] = []
        self.appends = self
        self.link = SimpleNamespace(durability=SimpleNamespace(before=lambda: math.inf))

    async def append(self, deltas: AppendColumns, *, new: bool = False) -> dict[int, AppendAck]:
        self.calls.append(deltas)
        await self.go.wait()
        if self.errors:
            raise self.errors.pop(0)
        refused = [i for i, rollout in enumerate(deltas.rollouts) if rollout == "gap"]
        return {i: AppendAck(deltas.attempts[i], AppendStatus.GAP, 7, False) for i in refused}

    @property
    def rollouts(self) -> list[list[str]]:
        return [list(call.rollouts) for call in self.calls]


class House:
    def __init__(self) -> None:
        self.state, self.store = CoordinatorState(), Store()
        for name in ("run", "other"):
            spec = RunSpec(name=name, model="m", environment=EnvironmentSpec(name="none"))
            self.state.add_run(name, spec).mirror.note_reconciled()
        engine = EngineInfo(model="m", vocab_size=9, max_model_len=99)
        hello = AttachReport(
            worker_id="w", kind=WorkerKind.SPOT, protocol_version=PROTOCOL_VERSION, slots=4, engine=engine
        )
        self.session = self.state.new_session("session", hello, 0.0)
        notifier = Notifier()
        self.readers = TokenReaders(notifier)
        store: Any = self.store  # an imitation
        self.storing = AppendBatcher(self.state, store, notifier, self.readers)

    def keep(self, *rollouts: str, run: str = "run") -> "asyncio.Task[dict[int, AppendAck]]":
        deltas = columns(*rollouts, run=run)
        unknown = FoundAttempts([None] * len(rollouts), follow_on=False)
        return asyncio.create_task(self.storing.keep(self.session, deltas, unknown))

    async def called(self, times: int = 1) -> None:
        await wait_until(lambda: len(self.store.calls) == times, what=f"{times} calls")


@pytest.fixture
async def house() -> House:
    return House()


def columns(*rollouts: str, run: str = "run", finishes: dict[int, FinishReason] | None = None) -> AppendColumns:
    attempts, many = [f"a-{rollout}" for rollout in rollouts], len(rollouts)
    tokens = b"".join(rollout[:1].encode() * TOKEN_BYTES for rollout in rollouts)
    return AppendColumns(run, list(rollouts), attempts, [4] * many, [1] * many, tokens, finishes or {})


def test_joined_deltas_keep_their_order_their_tokens_and_their_finishes() -> None:
    one, two = columns("a", "b", finishes={1: FinishReason.STOP}), columns("c", finishes={0: FinishReason.LENGTH})
    whole = joined([one, two])
    assert whole.pick([0, 1]) == one
    assert whole.pick([2]) == two


async def test_messages_that_come_while_the_store_is_busy_go_together_and_each_gets_its_own_answer(
    house: House,
) -> None:
    house.store.go.clear()
    first = house.keep("a")
    await house.called()
    others = house.keep("b", "gap"), house.keep("gap", "c")
    house.store.go.set()
    assert await first == {}
    found = [await other for other in others]
    assert house.store.rollouts == [["a"], ["b", "gap", "gap", "c"]]
    assert [list(acks) for acks in found] == [[1], [0]]
    assert found[0][1].stored == 7


async def test_a_store_that_is_away_is_asked_again_for_all_but_what_nobody_waits_for(house: House) -> None:
    house.store.errors = [StoreUnavailable("away")]
    house.store.go.clear()
    left, stays = house.keep("a"), house.keep("b")
    await house.called()
    left.cancel()
    await wait_until(left.done, what="the broken stream")
    assert not house.session.append_stream.drained.is_set()
    house.store.go.set()
    assert await stays == {}
    assert house.store.rollouts == [["a", "b"], ["b"]]
    assert house.session.append_stream.drained.is_set()


async def test_what_a_stream_brought_before_it_broke_is_seen_to_before_its_worker_counts_as_drained(
    house: House,
) -> None:
    house.store.go.clear()
    first = house.keep("a")
    await house.called()
    behind = house.keep("b")
    await asyncio.sleep(0)  # it is in line
    behind.cancel()
    await wait_until(behind.done, what="the broken stream")
    assert not house.session.append_stream.drained.is_set()
    house.store.go.set()
    assert await first == {}
    await house.session.append_stream.drained.wait()
    assert house.store.rollouts == [["a"], ["b"]]


async def test_an_error_of_the_store_reaches_all_who_wait_and_none_who_come_later(house: House) -> None:
    house.store.errors = [RuntimeError("broken")]
    for one in [house.keep("a"), house.keep("b")]:
        with pytest.raises(RuntimeError):
            await one
    assert await house.keep("c") == {}


async def test_an_unexpected_reply_ends_the_attempts_of_its_run_and_no_stream(house: House) -> None:
    house.store.errors = [Internal("broken")]
    for one in [house.keep("a"), house.keep("b")]:
        assert (await one)[0].status is AppendStatus.SUPERSEDED
    paused = {run_id for run_id, run in house.state.runs.items() if run.mirror.paused(time.monotonic())}
    assert paused == {"run"}
    assert await house.keep("x", run="other") == {}


async def test_a_run_that_is_not_reconciled_holds_back_its_own_messages_alone(house: House) -> None:
    other = house.state.runs["other"]
    other.mirror.doubt()
    held = house.keep("x", run="other")
    assert await house.keep("a") == {}
    assert not held.done()
    other.mirror.note_reconciled()
    assert await held == {}


async def test_a_run_that_pauses_before_it_is_reconciled_holds_nobody_back(house: House) -> None:
    run = house.state.runs["run"]
    run.mirror.doubt()
    held = house.keep("a")
    assert await house.keep("x", run="other") == {}
    run.mirror.pause(Internal("broken"))
    assert (await held)[0].status is AppendStatus.SUPERSEDED
    run.mirror.doubt()  # the store came back once more
    assert (await house.keep("a"))[0].status is AppendStatus.SUPERSEDED
    with pytest.raises(Internal), run.mirror.rereading():
        raise Internal("broken")
    assert (await house.keep("a"))[0].status is AppendStatus.SUPERSEDED
    assert house.store.rollouts == [["x"]]
    with run.mirror.rereading():
        held = house.keep("a")
        await house.keep("x", run="other")
        assert not held.done()  # it may be reconciled now
    run.mirror.note_reconciled()
    assert await held == {}


async def test_a_run_that_is_gone_has_no_attempts_any_more(house: House) -> None:
    house.state.drop_run(house.state.runs["run"])
    assert (await house.keep("a"))[0].status is AppendStatus.SUPERSEDED


async def test_readers_get_tokens_once_the_store_has_acknowledged_them_and_never_what_it_refused(
    house: House,
) -> None:
    async def read(offset: int) -> TokenChunk:
        return TokenChunk(offset=offset, tokens=b"")

    async def follow(rollout: str, offset: int) -> TokenChunk:
        with house.readers.reading("run", rollout) as reader:
            return await anext(reader.follow(offset, read))

    stored, refused = (asyncio.create_task(follow(rollout, 3)) for rollout in ("a", "gap"))
    await asyncio.sleep(0)  # they have looked
    house.store.go.clear()
    kept = house.keep("gap", "a")
    await house.called()
    assert not stored.done()
    house.store.go.set()
    await kept
    assert await stored == TokenChunk(offset=3, tokens=b"a" * TOKEN_BYTES)
    assert not refused.done()
    refused.cancel()
