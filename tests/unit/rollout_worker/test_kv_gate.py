"""Attempts enter the engine as its memory allows."""

import asyncio
from contextlib import suppress
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from ebbtide.rollout_worker.engine import EngineRequest
from ebbtide.rollout_worker.generation import kv_gate
from ebbtide.rollout_worker.generation.chunk_admission import divide_memory
from ebbtide.rollout_worker.generation.kv_gate import KvGate, KvTicket
from ebbtide.types.fleet import EngineInfo
from ebbtide.types.tokens import pack_ids
from tests.support.waiting import wait_until

INFO = EngineInfo(model="m", vocab_size=100, max_model_len=4096, kv_tokens=1024, kv_block=16, shares_prefixes=True)


@dataclass
class Door:
    """A gate, and attempts that stay inside until they are told to go or are parked."""

    info: EngineInfo = INFO
    inside: dict[str, KvTicket] = field(default_factory=dict)
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.gate = KvGate(self.info, 64, limits=True)

    def come(self, name: str, prompt: list[int], *, most: int, forecast: int = 0) -> KvTicket:
        request = EngineRequest(
            request_id=name,
            token_ids=prompt,
            temperature=1.0,
            top_p=1.0,
            top_k=0,
            max_tokens=most,
            min_tokens=0,
            stop_token_ids=(),
        )
        ticket = self.gate.ticket(request, pack_ids(prompt), forecast=forecast, first=False)
        self.tasks.append(asyncio.create_task(self._stay(name, ticket)))
        return ticket

    async def _stay(self, name: str, ticket: KvTicket) -> None:
        async with self.gate.room(ticket):
            self.inside[name] = ticket
            try:
                await wait_until(lambda: ticket.parked, 30)
            finally:
                del self.inside[name]

    async def go(self, *places: int) -> None:
        for place in places:
            self.tasks[place].cancel()
            with suppress(asyncio.CancelledError):
                await self.tasks[place]


@pytest.fixture
def door() -> Door:
    return Door()


async def test_attempts_wait_until_memory_is_free_and_enter_in_the_order_of_their_arrival(door: Door) -> None:
    for number in range(4):
        door.come(f"r{number}", [number] * 300, most=100, forecast=100)
    await wait_until(lambda: set(door.inside) == {"r0", "r1"})
    assert door.gate.waiting == 2
    assert door.gate.reserved <= 1024
    await door.go(0)
    await wait_until(lambda: set(door.inside) == {"r1", "r2"})
    await door.go(1, 2, 3)
    assert (door.gate.waiting, door.gate.reserved) == (0, 0)


async def test_a_group_shares_its_prompts_memory(door: Door) -> None:
    for number in range(4):
        door.come(f"r{number}", [7] * 640, most=40, forecast=40)
    await wait_until(lambda: len(door.inside) == 4)
    await door.go(*range(4))


async def test_an_attempt_that_outgrows_the_memory_makes_the_one_that_came_last_leave(door: Door) -> None:
    old = door.come("old", [1] * 600, most=1000, forecast=10)
    await wait_until(lambda: "old" in door.inside)
    door.come("young", [2] * 200, most=1000, forecast=10)
    await wait_until(lambda: "young" in door.inside)
    for _ in range(300):
        door.gate.made(old, 1, version=1)
        await asyncio.sleep(0)
    await wait_until(lambda: set(door.inside) == {"old"})
    assert door.gate.parked == 1
    await door.go(0)


async def test_an_engine_that_does_not_say_its_memory_limits_nobody() -> None:
    door = Door(info=EngineInfo(model="m", vocab_size=100, max_model_len=4096))
    for number in range(20):
        door.come(f"r{number}", [number] * 4000, most=90)
    await wait_until(lambda: len(door.inside) == 20)
    await door.go(*range(20))


async def test_those_that_wait_enter_an_engine_that_replaced_theirs_and_does_not_say_its_memory(door: Door) -> None:
    for number in range(4):
        door.come(f"r{number}", [number] * 600, most=100)
    await wait_until(lambda: len(door.inside) == 1)
    door.gate.engine_changed(EngineInfo(model="m", vocab_size=100, max_model_len=4096))
    await wait_until(lambda: len(door.inside) == 4)
    await door.go(*range(4))


async def test_a_forecast_counts_from_what_the_coordinator_had_stored(door: Door) -> None:
    ticket = door.come("r", [1] * 100, most=1000)
    await wait_until(lambda: "r" in door.inside)
    door.gate.made(ticket, 30, version=1)
    door.gate.forecast("r", 200, stored=10)  # of the 30 made since, it did not know 20
    assert ticket.context.rest == 180.0
    door.gate.forecast("r", 15, stored=10)
    assert not ticket.context.rest  # it outgrew its forecast
    door.gate.forecast("gone", 5, stored=0)
    await door.go(0)


async def test_a_shorter_forecast_lets_those_in_that_wait(door: Door) -> None:
    door.come("long", [1] * 300, most=700, forecast=700)
    await wait_until(lambda: "long" in door.inside)
    door.come("next", [2] * 300, most=100, forecast=100)
    await wait_until(lambda: door.gate.holds_back("next"))
    await asyncio.sleep(0)
    assert "next" not in door.inside
    door.gate.forecast("long", 20, stored=0)
    await wait_until(lambda: "next" in door.inside)
    await door.go(0, 1)


async def test_those_that_wait_are_looked_at_when_memory_was_freed_and_seldom_else(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked = list[int]()

    def divide(running: Any, waiting: Any, *rest: Any) -> Any:
        looked.append(len(waiting))
        return divide_memory(running, waiting, *rest)

    monkeypatch.setattr(kv_gate, "divide_memory", divide)
    now = 100.0
    monkeypatch.setattr(kv_gate, "time", SimpleNamespace(monotonic=lambda: now))
    old = door.come("old", [1] * 600, most=400, forecast=400)
    door.come("big", [2] * 600, most=400, forecast=400)
    await wait_until(lambda: "old" in door.inside)
    looked.clear()
    for _ in range(200):
        door.gate.made(old, 1, version=1)
        await asyncio.sleep(0)
    assert looked
    assert set(looked) == {0}
    now += 1.0
    for _ in range(100):
        door.gate.made(old, 1, version=1)
        await asyncio.sleep(0)
    assert looked.count(1) == 1, "the others draw near their ends"
    await door.go(0)
    await wait_until(lambda: "big" in door.inside)
    await door.go(1)


def test_what_waited_for_minutes_goes_before_requests_that_came_later() -> None:
    rollout = SimpleNamespace(first=False, context=SimpleNamespace(since_s=0.0))
    request = SimpleNamespace(first=True, context=SimpleNamespace(since_s=100.0))
    for now, ahead in ((200.0, request), (301.0, rollout)):
        ranks = {id(one): kv_gate._rank(one, now=now) for one in (rollout, request)}  # type: ignore[arg-type]
        assert min((rollout, request), key=lambda one: ranks[id(one)]) is ahead
