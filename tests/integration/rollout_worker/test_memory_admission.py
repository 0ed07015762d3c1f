"""A worker's engine runs out of memory only if nobody admits by memory; no rollout loses a token by waiting for it."""

from collections.abc import Callable
from typing import Any

from ebbtide.ledger import read_ledger
from ebbtide.types.run import Sampling
from ebbtide.v1 import fleet_pb2
from tests.support.waiting import wait_until

House = Any  # the fixture's class lives in conftest.py
Expected = Callable[[int], list[int]]

#: Tokens of memory, which hold a third of all rollouts' final contexts.
KV_TOKENS = 640
LENGTHS = {f"r{number}": 40 + 20 * number for number in range(12)}
MEMORY = {"kv_tokens": KV_TOKENS, "kv_block": 4}


def beat(house: House) -> fleet_pb2.Heartbeat:
    """The newest heartbeat."""
    found: fleet_pb2.Heartbeat = house.coordinator.heard["heartbeat"][-1]
    return found


async def finish_all(house: House, expected: Expected, **forecasts: int) -> None:
    for name, length in LENGTHS.items():
        house.coordinator.assign(name, Sampling(max_tokens=length), **forecasts)
    await wait_until(lambda: set(house.coordinator.finished) == set(LENGTHS), 30)
    assert all(house.coordinator.ids(name) == expected(length) for name, length in LENGTHS.items())


async def test_an_engine_without_admission_takes_memory_from_running_rollouts(house: House, expected: Expected) -> None:
    await house.worker(script=MEMORY, admit_by_memory=False)
    await finish_all(house, expected)
    await wait_until(lambda: beat(house).preemptions > 0)


async def test_admission_spares_the_engine_from_it_and_no_token_is_regenerated(
    house: House, expected: Expected
) -> None:
    await house.worker(script=MEMORY)
    await finish_all(house, expected)
    beats = len(house.coordinator.heard["heartbeat"])
    await wait_until(lambda: len(house.coordinator.heard["heartbeat"]) > beats + 1)
    assert beat(house).preemptions == 0
    assert any(one.unadmitted for one in house.coordinator.heard["heartbeat"])
    assert sum(record.generated for record in read_ledger(house.counter_file)) == sum(LENGTHS.values())
    assert house.coordinator.released() == {}


async def test_a_rollout_that_waits_for_memory_is_released_at_once_as_it_came(house: House, expected: Expected) -> None:
    await house.worker(script=MEMORY)
    house.coordinator.assign("runs", Sampling(max_tokens=3000), expected_tokens=600)
    await wait_until(lambda: house.coordinator.length("runs") > 8)
    house.coordinator.stored["waits"] = b""
    house.coordinator.assign("waits", Sampling(max_tokens=3000), expected_tokens=600)
    await wait_until(lambda: house.in_engine() == 1 and beat(house).unadmitted == 1)
    refs = [fleet_pb2.AttemptRef(run_id="run-1", rollout_id="waits", attempt_id=house.coordinator.fences["waits"])]
    house.coordinator.say(release=fleet_pb2.Release(attempts=refs, reason="balance"))
    await wait_until(lambda: house.coordinator.released() == {"waits": "balance"})
    assert house.coordinator.length("waits") == 0
    await wait_until(lambda: beat(house).unadmitted == 0)


async def test_a_forecast_that_comes_during_an_install_counts_behind_it(house: House) -> None:
    await house.worker(script={**MEMORY, "step_s": 0.02, "install_s": 0.3})
    house.coordinator.install(house.relay.publish(2))
    await wait_until(lambda: beat(house).held)
    for name in ("one", "other"):
        house.coordinator.assign(name, Sampling(max_tokens=3000), expected_tokens=600)
    told = [
        fleet_pb2.Forecasts.Forecast(attempt_id=house.coordinator.fences[name], expected_tokens=20)
        for name in ("one", "other")
    ]
    house.coordinator.say(forecasts=fleet_pb2.Forecasts(forecasts=told))
    await wait_until(lambda: house.in_engine() == 2, what="there is memory for both")


async def test_a_forecast_that_comes_later_lets_a_rollout_in_that_waited(house: House, expected: Expected) -> None:
    await house.worker(script={**MEMORY, "step_s": 0.02})
    house.coordinator.assign("runs", Sampling(max_tokens=3000), expected_tokens=600)
    await wait_until(lambda: house.coordinator.length("runs") > 8)
    house.coordinator.stored["waits"] = b""
    house.coordinator.assign("waits", Sampling(max_tokens=3000), expected_tokens=600)
    await wait_until(lambda: beat(house).unadmitted == 1)
    one = fleet_pb2.Forecasts.Forecast
    rests = [one(attempt_id=house.coordinator.fences[name], expected_tokens=20) for name in ("runs", "waits")]
    rests[0].stored = house.coordinator.length("runs")
    house.coordinator.say(forecasts=fleet_pb2.Forecasts(forecasts=rests))
    await wait_until(lambda: house.coordinator.length("waits") > 0)
    assert "runs" not in house.coordinator.finished
    assert house.coordinator.ids("waits") == expected(house.coordinator.length("waits"))


async def test_a_drain_releases_those_that_run_and_those_that_wait(house: House, expected: Expected) -> None:
    worker = await house.worker(script=MEMORY)
    for name in ("runs", "waits", "waits too"):
        house.coordinator.assign(name, Sampling(max_tokens=3000), expected_tokens=600)
    await wait_until(lambda: house.coordinator.length("runs") > 8 and beat(house).unadmitted == 2)
    await worker.end()
    assert set(house.coordinator.released()) == {"runs", "waits", "waits too"}
    made = sum(record.generated for record in read_ledger(house.counter_file))
    assert house.coordinator.length("runs") == made
    assert house.coordinator.ids("runs") == expected(made)


async def test_rollouts_that_outgrow_their_forecast_give_up_memory_and_end_exactly(
    house: House, expected: Expected
) -> None:
    await house.worker(script={**MEMORY, "step_s": 0.001})
    for name in ("first", "second", "third", "fourth"):
        house.coordinator.assign(name, Sampling(max_tokens=400), expected_tokens=100)
    await wait_until(lambda: len(house.coordinator.finished) == 4, 30)
    assert all(house.coordinator.ids(name) == expected(400) for name in ("first", "second", "third", "fourth"))
    await wait_until(lambda: beat(house).parked > 0)
    assert beat(house).preemptions == 0
    assert sum(record.generated for record in read_ledger(house.counter_file)) == 1600
