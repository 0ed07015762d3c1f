"""Users beside a run stay as long as it lasts."""

import asyncio

import pytest

from ebbtide.demo.coserving.coserving_demo import again_until
from ebbtide.demo.coserving.coserving_records import ServedAnswer
from ebbtide.errors import EbbtideError


def answer(at: float) -> ServedAnswer:
    return ServedAnswer(due=at, sent=at, first=at, last=at, prompt=1, output=1, failed="")


async def test_traffic_that_ends_before_the_run_begins_again_and_nothing_of_it_is_lost() -> None:
    over = asyncio.Event()
    sent: list[ServedAnswer] = []

    async def send() -> list[ServedAnswer]:
        sent.append(answer(float(len(sent))))
        if len(sent) == 3:
            over.set()
        return [sent[-1]]

    assert await again_until(over, send) == sent
    assert len(sent) == 3
    assert await again_until(over, send) == []


async def test_what_keeps_users_from_their_work_ends_it() -> None:
    async def send() -> list[ServedAnswer]:
        raise EbbtideError("the client ended")

    with pytest.raises(EbbtideError, match="the client ended"):
        await again_until(asyncio.Event(), send)
