"""Retries wait longer and longer, with jitter, only for what they were told, and not for ever."""

import asyncio
import itertools
import time

import pytest

from ebbtide.errors import NoCapacity, NotFound, Unavailable
from ebbtide.rpc.backoff import pauses, retrying


class Flaky:
    def __init__(self, *errors: Exception) -> None:
        self.errors, self.calls = list(errors), 0

    async def __call__(self) -> str:
        self.calls += 1
        if self.errors:
            raise self.errors.pop(0)
        return "done"


def test_pauses_double_up_to_the_cap_and_are_jittered() -> None:
    drawn = list(itertools.islice(pauses(0.1, 1.0), 8))
    for pause, full in zip(drawn, [0.1, 0.2, 0.4, 0.8, 1.0, 1.0, 1.0, 1.0], strict=True):
        assert full / 2 <= pause <= full
    assert len(set(drawn)) == 8


async def test_a_call_is_repeated_until_it_succeeds() -> None:
    call = Flaky(Unavailable("1"), Unavailable("2"))
    assert await retrying(call, patience_s=5, first_s=0.001) == "done"
    assert call.calls == 3


async def test_the_last_error_is_raised_when_patience_ends() -> None:
    call = Flaky(*(Unavailable(str(i)) for i in range(1000)))
    start = time.monotonic()
    with pytest.raises(Unavailable):
        await retrying(call, patience_s=0.1, first_s=0.01, cap_s=0.02)
    assert time.monotonic() - start < 2
    assert call.calls > 2


async def test_other_errors_are_raised_at_once() -> None:
    call = Flaky(NotFound("no"))
    with pytest.raises(NotFound):
        await retrying(call, patience_s=5)
    assert call.calls == 1


async def test_no_capacity_is_waited_for_as_long_as_it_asks() -> None:
    call = Flaky(NoCapacity("full", retry_after_s=0.2))
    start = time.monotonic()
    await retrying(call, patience_s=5, on=(NoCapacity,), first_s=0.001)
    assert time.monotonic() - start >= 0.2
    with pytest.raises(NoCapacity):
        await retrying(Flaky(NoCapacity("full", retry_after_s=60)), patience_s=1, on=(NoCapacity,))


async def test_a_retry_can_be_cancelled() -> None:
    task = asyncio.create_task(retrying(Flaky(*[Unavailable("x")] * 100), patience_s=60, first_s=10))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
