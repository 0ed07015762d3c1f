"""A worker sends an interactive rollout's tokens as they come, and makes no other rollout pay for it."""

import time
from collections.abc import Callable
from typing import Any

from ebbtide.types.fleet import INTERACTIVE_FLUSH_S
from ebbtide.types.run import Sampling
from tests.support.waiting import wait_until

House = Any  # the fixture's class lives in conftest.py
Expected = Callable[[int], list[int]]
#: A batch rollout's window that no test fills: what it sends before its finish is its first token, soon.
ENDLESS = {"flush_tokens": 10_000, "flush_interval_ms": 600_000}


async def test_an_interactive_rollout_streams_while_a_batch_rollout_fills_its_window(
    house: House, expected: Expected
) -> None:
    await house.worker(**ENDLESS)
    house.coordinator.assign("batch", Sampling(max_tokens=2000))
    await wait_until(lambda: house.coordinator.length("batch") > 0)
    begun = house.coordinator.length("batch")
    house.coordinator.assign("chat", Sampling(max_tokens=2000), interactive=True)
    await wait_until(lambda: house.coordinator.length("chat") > 0)
    first, messages, since = house.coordinator.length("chat"), house.coordinator.messages, time.monotonic()
    await wait_until(lambda: house.coordinator.length("chat") >= first + 100)
    assert house.coordinator.messages - messages <= (time.monotonic() - since) / INTERACTIVE_FLUSH_S + 2
    assert house.coordinator.length("batch") == begun
    assert house.coordinator.ids("chat") == expected(house.coordinator.length("chat"))


async def test_an_interactive_rollout_that_ends_is_stored_at_once(house: House, expected: Expected) -> None:
    await house.worker(**ENDLESS)
    house.coordinator.assign("chat", Sampling(max_tokens=30), interactive=True)
    await wait_until(lambda: "chat" in house.coordinator.finished)
    assert house.coordinator.ids("chat") == expected(30)


async def test_a_worker_that_is_told_a_longer_interval_sends_interactive_tokens_less_often(house: House) -> None:
    from ebbtide.v1 import fleet_pb2

    await house.worker(**ENDLESS)
    house.coordinator.say(flush_interval=fleet_pb2.FlushInterval(interactive_s=600.0))
    house.coordinator.assign("chat", Sampling(max_tokens=2000), interactive=True)
    await wait_until(lambda: house.coordinator.length("chat") > 0)
    begun = house.coordinator.length("chat")
    await wait_until(lambda: house.generated() > begun + 100)
    assert house.coordinator.length("chat") == begun
    house.coordinator.say(flush_interval=fleet_pb2.FlushInterval())
    await wait_until(lambda: house.coordinator.length("chat") > begun + 100)
