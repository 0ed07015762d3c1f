"""Tokens reach the store whole and once, whatever happens to streams, acknowledgements and the store."""

from collections.abc import Callable
from typing import Any

from ebbtide.ledger import read_ledger
from ebbtide.types.rollout import FinishReason
from ebbtide.types.run import Sampling
from ebbtide.types.tokens import TOKEN_BYTES
from tests.fakes.scripted_settings import ENGINE
from tests.support.waiting import wait_until

House = Any  # the fixture's class lives in conftest.py
Expected = Callable[[int], list[int]]


async def test_a_rollout_is_stored_with_its_finish(house: House, expected: Expected) -> None:
    await house.worker()
    house.coordinator.assign("r1", Sampling(max_tokens=50))
    await wait_until(lambda: "r1" in house.coordinator.finished)
    assert house.coordinator.ids("r1") == expected(50)
    assert house.coordinator.finished["r1"] == FinishReason.LENGTH
    assert set(house.coordinator.versions("r1")) == {1}


async def test_rollouts_share_messages(house: House) -> None:
    await house.worker()
    for number in range(16):
        house.coordinator.assign(f"r{number}", Sampling(max_tokens=32))
    await wait_until(lambda: len(house.coordinator.finished) == 16)
    assert house.coordinator.messages < 16 * 32 / 4, "fewer messages than flushes of single rollouts"


async def test_a_resumed_rollout_continues_identically(house: House, expected: Expected) -> None:
    await house.worker()
    house.coordinator.assign("whole", Sampling(max_tokens=40))
    await wait_until(lambda: "whole" in house.coordinator.finished)
    house.coordinator.stored["cut"] = house.coordinator.stored["whole"][: 13 * TOKEN_BYTES]
    house.coordinator.assign("cut", Sampling(max_tokens=40), attempt="a2")
    await wait_until(lambda: "cut" in house.coordinator.finished)
    assert house.coordinator.ids("cut") == expected(40)
    assert house.coordinator.stored["cut"] == house.coordinator.stored["whole"]
    records = {record.rollout_id: record for record in read_ledger(house.counter_file)}
    assert (records["cut"].start, records["cut"].generated) == (13, 27)


async def test_a_partial_that_has_ended_is_finished_at_once(house: House) -> None:
    await house.worker()
    house.coordinator.assign("r1", Sampling(max_tokens=10))
    await wait_until(lambda: "r1" in house.coordinator.finished)
    house.coordinator.finished.clear()
    house.coordinator.assign("r1", Sampling(max_tokens=10), attempt="a2")
    await wait_until(lambda: "r1" in house.coordinator.finished)
    assert house.coordinator.length("r1") == 10
    assert read_ledger(house.counter_file)[-1].generated == 0


async def test_a_broken_control_stream_costs_nothing(house: House, expected: Expected) -> None:
    await house.worker()
    house.coordinator.assign("r1", Sampling(max_tokens=300))
    await wait_until(lambda: house.coordinator.length("r1") > 20)
    house.coordinator.hang_up()
    await wait_until(lambda: "r1" in house.coordinator.finished)
    assert house.coordinator.ids("r1") == expected(300)
    assert len(house.coordinator.attaches) == 2
    assert [held.attempt.rollout_id for held in house.coordinator.attaches[1].held] == ["r1"]
    assert house.coordinator.attaches[1].installed[0].version == 1
    assert list(house.coordinator.attaches[1].capabilities) == [
        *("resume", "flush_interval", "forecasts", f"engine:{ENGINE}", "min_p")
    ]
    assert [record.generated for record in read_ledger(house.counter_file)] == [300]


async def test_attempts_that_were_given_away_meanwhile_are_dropped(house: House) -> None:
    worker = await house.worker()
    house.coordinator.assign("r1", Sampling(max_tokens=4000))
    await wait_until(lambda: house.coordinator.length("r1") > 20 and house.in_engine() == 1)
    house.coordinator.fences["r1"] = "another"
    house.coordinator.hang_up()
    await wait_until(lambda: len(house.coordinator.attaches) == 2)
    await wait_until(lambda: house.in_engine() == 0)
    stored = house.coordinator.length("r1")
    await worker.end()
    assert house.coordinator.length("r1") == stored
    assert house.coordinator.released() == {}


async def test_a_superseded_attempt_stops_generating(house: House) -> None:
    await house.worker()
    house.coordinator.assign("r1", Sampling(max_tokens=4000))
    await wait_until(lambda: house.coordinator.length("r1") > 20 and house.in_engine() == 1)
    house.coordinator.fences["r1"] = "another"
    await wait_until(lambda: house.in_engine() == 0)


async def test_a_cancelled_attempt_stops_generating(house: House) -> None:
    await house.worker()
    house.coordinator.assign("r1", Sampling(max_tokens=4000))
    await wait_until(lambda: house.coordinator.length("r1") > 20 and house.in_engine() == 1)
    from ebbtide.v1 import fleet_pb2

    ref = fleet_pb2.AttemptRef(run_id="run-1", rollout_id="r1", attempt_id=house.coordinator.fences["r1"])
    house.coordinator.say(cancel=fleet_pb2.CancelBatch(attempts=[ref]))
    await wait_until(lambda: house.in_engine() == 0)


async def test_a_lost_acknowledgement_is_made_up_for_by_sending_again(house: House, expected: Expected) -> None:
    await house.worker()
    house.coordinator.assign("r1", Sampling(max_tokens=200))
    await wait_until(lambda: house.coordinator.length("r1") > 20)
    house.coordinator.lossy = True
    await wait_until(lambda: "r1" in house.coordinator.finished)
    assert house.coordinator.ids("r1") == expected(200)
    assert len(house.coordinator.attaches) == 1, "only the append stream was opened again"


async def test_a_store_that_knows_less_is_sent_what_it_lacks(house: House, expected: Expected) -> None:
    await house.worker()
    house.coordinator.assign("r1", Sampling(max_tokens=200))
    await wait_until(lambda: house.coordinator.length("r1") > 60)
    house.coordinator.stored["r1"] = house.coordinator.stored["r1"][: 5 * TOKEN_BYTES]
    await wait_until(lambda: "r1" in house.coordinator.finished)
    assert house.coordinator.ids("r1") == expected(200)


async def test_a_finish_is_kept_until_it_is_durable(house: House, expected: Expected) -> None:
    house.coordinator.durable = False
    await house.worker()
    house.coordinator.assign("r1", Sampling(max_tokens=20))
    await wait_until(lambda: "r1" in house.coordinator.finished)
    # The store restarts and has lost it all.
    house.coordinator.stored["r1"] = b""
    house.coordinator.finished.clear()
    house.coordinator.durable = True
    house.coordinator.hang_up()
    await wait_until(lambda: "r1" in house.coordinator.finished)
    assert house.coordinator.ids("r1") == expected(20)


async def test_a_slow_store_holds_the_engine_and_loses_nothing(house: House, expected: Expected) -> None:
    await house.worker(flush_tokens=40, script={"step_s": 0.001})
    house.coordinator.assign("r1", Sampling(max_tokens=400))
    await wait_until(lambda: house.coordinator.length("r1") > 4)
    house.coordinator.store_up.clear()
    beats = len(house.coordinator.heard["heartbeat"])
    stored = house.coordinator.length("r1")
    await house.coordinator.hear("heartbeat", beats + 8)  # heartbeats go on; 0.4 s would be 400 tokens
    assert stored + 24 <= house.generated() <= stored + 40
    house.coordinator.store_up.set()
    await wait_until(lambda: "r1" in house.coordinator.finished)
    assert house.coordinator.ids("r1") == expected(400)


async def test_a_worker_held_for_a_slow_store_goes_on_once_its_attempts_were_given_away(
    house: House, expected: Expected
) -> None:
    await house.worker(flush_tokens=40, script={"step_s": 0.001})
    house.coordinator.assign("r1", Sampling(max_tokens=4000))
    await house.hold_store("r1")
    beats = len(house.coordinator.heard["heartbeat"])
    await house.coordinator.hear("heartbeat", beats + 4)  # 0.2 s would be 200 tokens
    assert house.generated() <= house.coordinator.length("r1") + 60
    house.coordinator.fences["r1"] = "another"
    house.coordinator.hang_up()
    await wait_until(lambda: len(house.coordinator.attaches) == 2)
    house.coordinator.store_up.set()
    house.coordinator.assign("r2", Sampling(max_tokens=50))
    await wait_until(lambda: "r2" in house.coordinator.finished)
    assert house.coordinator.ids("r2") == expected(50)
