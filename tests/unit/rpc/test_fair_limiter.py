"""Calls of one user take turns; those of others, and those without a name, do not wait for them."""

import asyncio

import pytest

from ebbtide.auth.roles import TABLE
from ebbtide.rpc.fair_limiter import WITHOUT_TURN, FairLimiter, end_turn, stream_turn
from tests.support.waiting import wait_until


class Work:
    """Calls that last until the test says so."""

    def __init__(self, turns: FairLimiter) -> None:
        self.turns, self.go_on, self.begun = turns, asyncio.Event(), list[str]()
        self.at_once = self.most = 0

    async def call(self, user: str, name: str) -> None:
        async with self.turns.of(user):
            self.begun.append(name)
            self.at_once += 1
            self.most = max(self.most, self.at_once)
            try:
                await self.go_on.wait()
                await asyncio.sleep(0)
            finally:
                self.at_once -= 1


async def settled() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def begin(work: Work, user: str, names: str) -> list["asyncio.Task[None]"]:
    return [asyncio.create_task(work.call(user, name)) for name in names]


async def test_as_many_calls_of_a_user_work_as_may_and_the_rest_go_in_order() -> None:
    work = Work(FairLimiter(2))
    calls = begin(work, "greedy", "abcde")
    await settled()
    assert work.begun == ["a", "b"]
    others = begin(work, "other", "x")
    await settled()
    assert work.begun == ["a", "b", "x"]
    work.go_on.set()
    await asyncio.gather(*calls, *others)
    assert work.begun == ["a", "b", "x", "c", "d", "e"]
    assert not work.turns.users


async def test_a_call_that_leaves_while_it_waits_takes_no_turn() -> None:
    work = Work(FairLimiter(1))
    calls = begin(work, "greedy", "abc")
    await settled()
    calls[1].cancel()
    with pytest.raises(asyncio.CancelledError):
        await calls[1]
    work.go_on.set()
    await asyncio.gather(calls[0], calls[2])
    assert work.begun == ["a", "c"]
    assert not work.turns.users


async def test_a_call_that_leaves_as_another_begins_opens_no_second_count() -> None:
    work = Work(FairLimiter(1))
    first, waits = begin(work, "greedy", "ab")
    await settled()
    work.go_on.set()
    await asyncio.sleep(0)  # the first is about to end
    work.go_on.clear()
    begun = begin(work, "greedy", "c")  # it comes after that end, and before the cancelled one runs
    waits.cancel()
    calls = [first, waits, *begun]
    await settled()
    calls += begin(work, "greedy", "de")
    await settled()
    assert work.most == 1
    work.go_on.set()
    await asyncio.gather(*calls, return_exceptions=True)
    assert work.begun == ["a", "c", "d", "e"]
    assert (work.most, len(work.turns.users)) == (1, 0)


async def test_a_call_that_gets_its_turn_and_leaves_passes_it_on() -> None:
    work = Work(FairLimiter(1))
    calls = begin(work, "greedy", "abc")
    await settled()
    work.go_on.set()
    await wait_until(calls[0].done)
    calls[1].cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    assert work.begun[-1] == "c"
    assert (work.most, len(work.turns.users)) == (1, 0)


async def test_a_call_that_ended_its_turn_leaves_room_for_one_other() -> None:
    turns, go_on, begun = FairLimiter(1), asyncio.Event(), list[str]()

    async def call(name: str) -> None:
        async with turns.of("greedy"):
            begun.append(name)
            await asyncio.create_task(shielded(name))  # as a write that goes on without its client

    async def shielded(name: str) -> None:
        if name == "a":
            end_turn()
            end_turn()
        await go_on.wait()

    calls = [asyncio.create_task(call(name)) for name in "abc"]
    await settled()
    assert begun == ["a", "b"]
    go_on.set()
    await asyncio.gather(*calls)
    assert begun == ["a", "b", "c"]
    assert not turns.users
    end_turn()  # without a call there is none


def test_methods_without_a_turn_exist() -> None:
    assert TABLE.keys() >= WITHOUT_TURN


@pytest.mark.parametrize(("at_once", "user"), [(1, ""), (0, "greedy")])
async def test_callers_without_a_name_and_without_a_bound_do_not_wait(at_once: int, user: str) -> None:
    work = Work(FairLimiter(at_once))
    calls = begin(work, user, "abc")
    await settled()
    assert work.begun == ["a", "b", "c"]
    work.go_on.set()
    await asyncio.gather(*calls)


async def test_a_streams_pieces_of_work_take_their_users_turns() -> None:
    turns = FairLimiter(1)
    work, seen = Work(turns), list[str]()
    calls = begin(work, "greedy", "a")
    await settled()

    async def stream(user: str) -> None:
        turns.begin_stream(user)
        async with stream_turn():
            seen.append(user)

    streams = [asyncio.create_task(stream(user)) for user in ("greedy", "other")]
    await settled()
    assert seen == ["other"]
    work.go_on.set()
    await asyncio.gather(*calls, *streams)
    assert seen == ["other", "greedy"]
    async with stream_turn():  # in no stream there is nothing to wait for
        pass
