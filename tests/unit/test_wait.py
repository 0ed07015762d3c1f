"""Waiting for conditions."""

import pytest

from tests.support.waiting import wait_until


async def test_the_first_truthy_value_is_returned_from_plain_and_async_predicates() -> None:
    values = iter([0, None, "", 7])
    assert await wait_until(lambda: next(values)) == 7

    async def later() -> str:
        return "now"

    assert await wait_until(later) == "now"


async def test_a_condition_that_does_not_come_is_told_with_its_last_value() -> None:
    with pytest.raises(TimeoutError, match=r"not within 0\.05 s: eight workers; last value 0"):
        await wait_until(lambda: 0, timeout=0.05, what="eight workers")


async def test_an_error_of_the_predicate_is_not_swallowed() -> None:
    with pytest.raises(ZeroDivisionError):
        await wait_until(lambda: 1 // 0)
