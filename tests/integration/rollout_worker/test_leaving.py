"""A worker that is asked to leave hands everything over; one that is killed leaves its ledger."""

import asyncio
import signal
from collections.abc import Callable
from typing import Any

import pytest

from ebbtide.errors import InvalidRequest, NotReady, Unavailable
from ebbtide.ledger import read_ledger
from ebbtide.rollout_worker.engine import EngineFailed
from ebbtide.types.run import Sampling
from ebbtide.v1 import fleet_pb2
from tests.fakes.scripted_engine import ScriptedEngine
from tests.fakes.scripted_settings import ScriptedSettings, write_script
from tests.support.waiting import wait_until

House = Any  # the fixture's class lives in conftest.py
Expected = Callable[[int], list[int]]


async def test_a_drain_hands_over_every_token(house: House, expected: Expected) -> None:
    worker = await house.worker()
    for number in range(8):
        house.coordinator.assign(f"r{number}", Sampling(max_tokens=4000))
    await wait_until(lambda: all(house.coordinator.length(f"r{number}") > 20 for number in range(8)))
    await worker.end()
    assert house.coordinator.heard["draining"][0].deadline_s > 0
    assert house.coordinator.released() == {f"r{number}": "drained" for number in range(8)}
    for record in read_ledger(house.counter_file):
        assert record.generated == house.coordinator.length(record.rollout_id)
        assert house.coordinator.ids(record.rollout_id) == expected(record.generated)


async def test_a_draining_worker_takes_nothing_more(house: House) -> None:
    worker = await house.worker()
    house.coordinator.assign("r1", Sampling(max_tokens=4000))
    await house.hold_store("r1")
    worker.shutdown.requested.set()
    await house.coordinator.hear("draining")
    house.coordinator.assign("late", Sampling(max_tokens=4))
    await wait_until(lambda: "late" in house.coordinator.released())
    assert house.coordinator.released() == {"late": "draining"}
    house.coordinator.store_up.set()
    await worker.end()
    assert house.coordinator.released()["r1"] == "drained"


async def test_the_coordinator_may_ask_for_the_drain(house: House) -> None:
    worker = await house.worker()
    house.coordinator.say(drain=fleet_pb2.Drain(deadline_s=5))
    await worker.task


def handed_over(house: House, expected: Expected) -> bool:
    """Whether the store has exactly what left the engine."""
    records = read_ledger(house.counter_file)
    return all(house.coordinator.ids(one.rollout_id) == expected(one.start + one.generated) for one in records)


async def test_a_drain_names_its_reason_and_a_deadline_with_a_margin(house: House) -> None:
    worker = await house.worker()
    house.coordinator.say(drain=fleet_pb2.Drain(deadline_s=10))
    notice = await house.coordinator.hear("draining")
    assert notice.reason == "asked"
    assert 8.0 < notice.deadline_s <= 9.0
    await worker.task


async def test_a_drain_cuts_a_slow_pull_short(house: House, expected: Expected) -> None:
    worker = await house.worker()
    house.coordinator.assign("r1", Sampling(max_tokens=4000))
    await wait_until(lambda: house.coordinator.length("r1") > 20)
    house.relay.flowing.clear()
    house.coordinator.install(house.relay.publish(2))
    await wait_until(lambda: house.relay.asked >= 2)
    await worker.end()
    assert handed_over(house, expected)
    assert house.coordinator.released() == {"r1": "drained"}
    assert len(house.coordinator.heard["installed"]) == 1
    assert "install_failed" not in house.coordinator.heard


async def test_a_drain_hands_over_during_an_install_that_outlasts_it(
    house: House, expected: Expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = await house.worker(flush_tokens=10_000)
    house.coordinator.assign("r1", Sampling(max_tokens=4000))
    await wait_until(lambda: house.coordinator.length("r1") > 20)
    house.coordinator.store_up.clear()
    await wait_until(lambda: house.generated() > house.coordinator.length("r1"))
    monkeypatch.setattr(ScriptedEngine, "install_s", 60.0)
    house.coordinator.install(house.relay.publish(2))
    await wait_until(lambda: house.coordinator.heard["heartbeat"][-1].held)
    house.coordinator.say(drain=fleet_pb2.Drain(deadline_s=10))
    await house.coordinator.hear("draining")
    house.coordinator.store_up.set()
    await worker.task
    assert handed_over(house, expected)
    assert house.coordinator.released() == {"r1": "drained"}


async def test_a_drain_does_not_wait_for_an_engine_that_is_too_busy_to_pause(
    house: House, expected: Expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    pause = ScriptedEngine.pause

    async def busy(engine: ScriptedEngine, reason: str) -> None:
        if reason == "drain":
            await asyncio.Event().wait()
        await pause(engine, reason)

    monkeypatch.setattr(ScriptedEngine, "pause", busy)
    worker = await house.worker()
    house.coordinator.assign("r1", Sampling(max_tokens=4000))
    await wait_until(lambda: house.coordinator.length("r1") > 20)
    house.coordinator.say(drain=fleet_pb2.Drain(deadline_s=2))
    await worker.task
    assert handed_over(house, expected)
    assert house.coordinator.released() == {"r1": "drained"}


async def test_a_drain_hands_over_what_a_stalled_engine_made(house: House, expected: Expected) -> None:
    worker = await house.worker(script={"stall_after_tokens": 30})
    house.coordinator.assign("r1", Sampling(max_tokens=4000))
    await wait_until(lambda: house.coordinator.length("r1") == 30)
    await worker.end()
    assert handed_over(house, expected)
    assert house.coordinator.released() == {"r1": "drained"}


async def test_a_second_notice_can_only_hasten_a_drain(house: House) -> None:
    worker = await house.worker()
    house.coordinator.assign("r1", Sampling(max_tokens=4000))
    await house.hold_store("r1")
    house.coordinator.say(drain=fleet_pb2.Drain(deadline_s=100))
    await house.coordinator.hear("draining")
    house.coordinator.say(drain=fleet_pb2.Drain(deadline_s=200))
    house.coordinator.say(drain=fleet_pb2.Drain(deadline_s=0.5))
    hastened = await house.coordinator.hear("draining", 2)
    assert hastened.deadline_s < 0.5
    with pytest.raises(Unavailable, match="other workers generate them again"):
        await asyncio.wait_for(worker.task, 10)
    assert len(house.coordinator.heard["draining"]) == 2


async def test_a_signal_during_a_drain_hastens_it_and_ends_nothing(house: House, expected: Expected) -> None:
    process = await house.process()
    house.coordinator.assign("r1", Sampling(max_tokens=4000))
    await house.hold_store("r1")
    house.coordinator.say(drain=fleet_pb2.Drain(deadline_s=100))
    await house.coordinator.hear("draining")
    process.send_signal(signal.SIGTERM)
    assert (await house.coordinator.hear("draining", 2)).deadline_s < 20
    house.coordinator.store_up.set()
    await wait_until(lambda: process.poll() is not None)
    assert process.returncode == 0
    assert handed_over(house, expected)


async def test_a_drain_waits_for_a_coordinator_that_is_away(house: House, expected: Expected) -> None:
    worker = await house.worker()
    house.coordinator.assign("r1", Sampling(max_tokens=4000))
    await house.hold_store("r1")
    house.coordinator.away = True
    house.coordinator.hang_up()
    await wait_until(lambda: house.coordinator.refused >= 1)
    worker.shutdown.requested.set()
    await wait_until(lambda: house.coordinator.refused >= 4)
    house.coordinator.away = False
    house.coordinator.store_up.set()
    await worker.end()
    assert handed_over(house, expected)
    assert house.coordinator.released() == {"r1": "drained"}


async def test_a_worker_told_to_leave_before_its_attempts_began_hands_them_back(house: House) -> None:
    worker = await house.worker()
    for number in range(32):
        house.coordinator.assign(f"r{number}", Sampling(max_tokens=4000))
    house.coordinator.say(drain=fleet_pb2.Drain(deadline_s=10))
    await worker.task
    assert set(house.coordinator.released()) == {f"r{number}" for number in range(32)}


async def test_a_drain_goes_on_over_a_broken_stream(house: House) -> None:
    worker = await house.worker()
    house.coordinator.assign("r1", Sampling(max_tokens=4000))
    await house.hold_store("r1")
    worker.shutdown.requested.set()
    await house.coordinator.hear("draining")
    house.coordinator.hang_up()
    await wait_until(lambda: len(house.coordinator.attaches) == 2)
    house.coordinator.store_up.set()
    await worker.end()
    assert read_ledger(house.counter_file)[0].generated == house.coordinator.length("r1")


async def test_a_drain_that_cannot_end_says_so(house: House) -> None:
    worker = await house.worker(drain_timeout_s=0.2)
    house.coordinator.assign("r1", Sampling(max_tokens=4000))
    await house.hold_store("r1")
    with pytest.raises(Unavailable, match="other workers generate them again"):
        await worker.end()


async def test_a_lost_engine_takes_the_worker_out_and_its_tokens_are_kept(house: House) -> None:
    worker = await house.worker(script={"fail_after_tokens": 30})
    house.coordinator.assign("r1", Sampling(max_tokens=4000))
    await worker.task
    assert isinstance(worker.shutdown.failure, EngineFailed)
    assert house.coordinator.length("r1") == 30
    assert house.coordinator.released()["r1"].startswith("stopped")


async def test_an_engine_that_dies_without_work_takes_the_worker_out_too(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = await house.worker()

    def dead(_: ScriptedEngine) -> None:
        raise EngineFailed("died in its sleep")

    monkeypatch.setattr(ScriptedEngine, "check", dead)
    await worker.task
    assert isinstance(worker.shutdown.failure, EngineFailed)
    assert house.coordinator.heard["draining"][0].reason == "failed"


async def test_sigterm_ends_the_process_without_losing_a_token(house: House, expected: Expected) -> None:
    process = await house.process()
    for number in range(8):
        house.coordinator.assign(f"r{number}", Sampling(max_tokens=4000))
    await wait_until(lambda: all(house.coordinator.length(f"r{number}") > 8 for number in range(8)))
    process.send_signal(signal.SIGTERM)
    await wait_until(lambda: process.poll() is not None)
    assert process.returncode == 0
    for record in read_ledger(house.counter_file):
        assert house.coordinator.ids(record.rollout_id) == expected(record.generated)
    assert len(house.coordinator.released()) == 8


async def test_after_a_sigkill_at_most_one_flush_window_is_missing(house: House) -> None:
    process = await house.process("--engine-options", write_script(ScriptedSettings(step_s=0.05)))
    for number in range(8):
        house.coordinator.assign(f"r{number}", Sampling(max_tokens=4000))
    await wait_until(lambda: all(house.coordinator.length(f"r{number}") > 8 for number in range(8)))
    process.kill()
    process.wait(10)
    records = read_ledger(house.counter_file)
    assert len(records) == 8
    # A window is 20 ms, and a token takes 50: one on its way, and some room for a busy machine.
    assert all(0 <= record.generated - house.coordinator.length(record.rollout_id) <= 4 for record in records)


async def test_a_wrong_token_ends_the_worker_with_the_reason(house: House) -> None:
    from ebbtide.auth.security import ClientSecurity

    worker = await house.worker(version=0, client=ClientSecurity(token="not-the-token"))
    await wait_until(worker.shutdown.requested.is_set)
    with pytest.raises(Unavailable, match="had ended"):
        await worker.task
    assert type(worker.shutdown.failure).__name__ == "Unauthenticated"


async def test_an_unknown_model_is_refused_by_name(house: House) -> None:
    worker = await house.worker(version=0, engine="vllm", engine_options="", model="/no/such/checkpoint")
    with pytest.raises(InvalidRequest, match="model: '/no/such/checkpoint' is no directory"):
        await worker.task


async def test_a_coordinator_of_another_protocol_ends_the_worker_with_the_reason(house: House) -> None:
    house.coordinator.protocol_version += 1
    worker = await house.worker(version=0)
    with pytest.raises(Unavailable, match="had ended"):
        await worker.task
    assert isinstance(worker.shutdown.failure, NotReady)
    speaks = house.coordinator.protocol_version
    assert f"the coordinator speaks protocol {speaks}, this worker {speaks - 1}" in str(worker.shutdown.failure)
