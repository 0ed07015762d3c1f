"""Calls of one user take turns; those of others, and those without a name, do not wait for them."""

import asyncio

import pytest

from ebbtide.rpc.caller_turns import CallerTurns, stream_turn


class Work:
    """Calls that last until the test says so."""

    def __init__(self, turns: CallerTurns) -> None:
        self._turns, self.go_on, self.begun = turns, asyncio.Event(), list[str]()

    async def call(self, user: str, name: str) -> None:
        async with self._turns.of(user):
            self.begun.append(name)
            await self.go_on.wait()
            await asyncio.sleep(0)


async def settled() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def begin(work: Work, user: str, names: str) -> list["asyncio.Task[None]"]:
    return [asyncio.create_task(work.call(user, name)) for name in names]


async def test_as_many_calls_of_a_user_work_as_may_and_the_rest_go_in_order() -> None:
    work = Work(CallerTurns(2))
    calls = begin(work, "greedy", "abcde")
    await settled()
    assert work.begun == ["a", "b"]
    others = begin(work, "other", "x")
    await settled()
    assert work.begun == ["a", "b", "x"]
    work.go_on.set()
    await asyncio.gather(*calls, *others)
    assert work.begun == ["a", "b", "x", "c", "d", "e"]


async def test_a_call_that_leaves_while_it_waits_takes_no_turn() -> None:
    work = Work(CallerTurns(1))
    calls = begin(work, "greedy", "abc")
    await settled()
    calls[1].cancel()
    with pytest.raises(asyncio.CancelledError):
        await calls[1]
    work.go_on.set()
    await asyncio.gather(calls[0], calls[2])
    assert work.begun == ["a", "c"]


@pytest.mark.parametrize(("at_once", "user"), [(1, ""), (0, "greedy")])
async def test_callers_without_a_name_and_without_a_bound_do_not_wait(at_once: int, user: str) -> None:
    work = Work(CallerTurns(at_once))
    calls = begin(work, user, "abc")
    await settled()
    assert work.begun == ["a", "b", "c"]
    work.go_on.set()
    await asyncio.gather(*calls)


async def test_a_streams_pieces_of_work_take_their_users_turns() -> None:
    turns = CallerTurns(1)
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
