"""Single rollouts are handed back on request, whole, and no other is touched; nothing asked waits behind an install."""

from collections.abc import Callable
from typing import Any

import pytest

from ebbtide.ledger import read_ledger
from ebbtide.rollout_worker import metrics
from ebbtide.types.fleet import EndCause, WorkerState
from ebbtide.types.run import Sampling
from ebbtide.v1 import fleet_pb2, types_pb2
from tests.fakes.scripted_engine import ScriptedEngine
from tests.support.waiting import wait_until

House = Any  # the fixture's class lives in conftest.py
Expected = Callable[[int], list[int]]


def refs(house: House, *names: str) -> list[fleet_pb2.AttemptRef]:
    fences = house.coordinator.fences
    return [fleet_pb2.AttemptRef(run_id="run-1", rollout_id=name, attempt_id=fences[name]) for name in names]


def release(house: House, *names: str, reason: str = "") -> None:
    house.coordinator.say(release=fleet_pb2.Release(attempts=refs(house, *names), reason=reason))


async def test_a_released_rollout_comes_back_with_every_token_that_was_made(house: House, expected: Expected) -> None:
    await house.worker()
    for name in ("moved", "stays"):
        house.coordinator.assign(name, Sampling(max_tokens=400))
    await wait_until(lambda: house.coordinator.length("moved") > 20)
    release(house, "moved", reason="balance")
    await wait_until(lambda: "moved" in house.coordinator.released())
    (record,) = [one for one in read_ledger(house.counter_file) if one.rollout_id == "moved"]
    assert house.coordinator.ids("moved") == expected(record.generated), "all of it was stored before it was released"
    assert house.coordinator.released() == {"moved": "balance"}
    assert house.coordinator.causes() == {"moved": EndCause.MOVED}
    await wait_until(lambda: "stays" in house.coordinator.finished)
    assert house.coordinator.ids("stays") == expected(400)
    assert "moved" not in house.coordinator.finished


async def test_a_rollout_is_released_only_once_its_tokens_are_stored(house: House) -> None:
    await house.worker()
    house.coordinator.assign("r1", Sampling(max_tokens=4000))
    await wait_until(lambda: house.in_engine() == 1)
    await house.hold_store("r1")
    release(house, "r1")
    await wait_until(lambda: house.in_engine() == 0)
    assert house.coordinator.released() == {}
    generated = house.generated()
    house.coordinator.store_up.set()
    await wait_until(lambda: house.coordinator.released() == {"r1": "moved"})
    assert house.coordinator.length("r1") == house.generated() == generated


async def test_a_rollout_moves_from_worker_to_worker_any_number_of_times(house: House, expected: Expected) -> None:
    await house.worker()
    for move in range(6):
        house.coordinator.assign("r1", Sampling(max_tokens=200), attempt=f"a{move}")
        await wait_until(lambda: house.coordinator.length("r1") > 20 * (move + 1))  # noqa: B023
        release(house, "r1", reason=f"move {move}")
        await wait_until(lambda: house.coordinator.released().get("r1") == f"move {move}")  # noqa: B023
    house.coordinator.assign("r1", Sampling(max_tokens=200), attempt="last")
    await wait_until(lambda: "r1" in house.coordinator.finished)
    assert house.coordinator.ids("r1") == expected(200)
    assert sum(record.generated for record in read_ledger(house.counter_file)) == 200, "nothing was generated twice"


async def test_one_that_has_finished_meanwhile_finishes_and_unknown_ones_are_ignored(house: House) -> None:
    await house.worker(flush_tokens=1000)
    house.coordinator.assign("done", Sampling(max_tokens=8))
    house.coordinator.assign("other", Sampling(max_tokens=4000))
    await wait_until(lambda: house.coordinator.length("other") > 8)
    house.coordinator.store_up.clear()
    house.coordinator.assign("late", Sampling(max_tokens=8))
    await wait_until(lambda: read_ledger(house.counter_file)[-1].generated == 8)
    house.coordinator.fences["never"] = "never-a1"
    release(house, "done", "late", "never", "other")
    house.coordinator.store_up.set()
    await wait_until(lambda: "other" in house.coordinator.released())
    await wait_until(lambda: "late" in house.coordinator.finished)
    assert set(house.coordinator.released()) == {"other"}


async def test_one_that_has_not_started_goes_back_at_once(house: House) -> None:
    await house.worker(script={"first_token_s": 60.0})
    house.coordinator.assign("r1", Sampling(max_tokens=8))
    await wait_until(lambda: house.in_engine() == 1)
    release(house, "r1")
    await wait_until(lambda: "r1" in house.coordinator.released())
    assert house.generated() == 0


async def test_release_cancel_and_drain_do_not_wait_for_an_install(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = await house.worker(script={"install_s": 0.05})
    house.coordinator.assign("running", Sampling(max_tokens=4000))
    await wait_until(lambda: house.coordinator.length("running") > 8)
    monkeypatch.setattr(ScriptedEngine, "install_s", 60.0)
    house.coordinator.install(house.relay.publish(2))
    await wait_until(lambda: house.coordinator.heard["heartbeat"][-1].held)
    for name in ("moved", "cancelled", "drained"):
        house.coordinator.assign(name, Sampling(max_tokens=8))
    await wait_until(lambda: metrics.WAITING._value.get() == 3)
    release(house, "moved", "running")
    house.coordinator.say(cancel=fleet_pb2.CancelBatch(attempts=refs(house, "cancelled")))
    await wait_until(lambda: set(house.coordinator.released()) == {"moved", "running"})
    house.coordinator.say(drain=fleet_pb2.Drain(deadline_s=30.0))
    await wait_until(lambda: "drained" in house.coordinator.released())
    await worker.task
    assert house.coordinator.released() == {"moved": "moved", "running": "moved", "drained": "draining"}
    causes = {"moved": EndCause.MOVED, "running": EndCause.MOVED, "drained": EndCause.WORKER_LEAVES}
    assert house.coordinator.causes() == causes


async def test_what_arrives_during_an_install_is_judged_by_the_new_version(house: House) -> None:
    await house.worker(script={"install_s": 0.3})
    house.coordinator.install(house.relay.publish(2))
    await wait_until(lambda: house.coordinator.heard["heartbeat"][-1].held)
    house.coordinator.assign("old", Sampling(max_tokens=8), max_version=1)
    house.coordinator.assign("new", Sampling(max_tokens=8), min_version=2)
    await wait_until(lambda: "new" in house.coordinator.finished and "old" in house.coordinator.released())
    assert set(house.coordinator.versions("new")) == {2}


@pytest.mark.parametrize(
    ("sampling", "named"),
    [
        ({"temperature": -1.0}, "temperature"),
        ({"max_tokens": 4, "repetition_penalty": 1.0, "seed": 3}, "seed"),
        ({"stop": ["x"]}, "max_tokens"),
    ],
)
async def test_a_rollout_that_no_worker_could_generate_goes_back_and_ends_nothing(
    house: House, sampling: dict[str, Any], named: str
) -> None:
    worker = await house.worker()
    house.coordinator.assign("good", Sampling(max_tokens=300))
    house.coordinator.assign("bad", Sampling(max_tokens=4), broken=types_pb2.Sampling(top_p=1.0, **sampling))
    await wait_until(lambda: "bad" in house.coordinator.released())
    assert f"sampling.{named}" in house.coordinator.released()["bad"]
    assert house.coordinator.causes()["bad"] is EndCause.FAILED
    await wait_until(lambda: "good" in house.coordinator.finished)
    assert not worker.task.done()


async def test_the_worker_states_its_flush_window(house: House) -> None:
    await house.worker(version=0, flush_tokens=7, flush_interval_ms=40)
    attach = house.coordinator.attaches[0]
    assert (attach.flush_tokens, attach.flush_interval_s) == (7, 0.04)
    assert "flush_interval" in attach.capabilities


async def test_the_worker_flushes_less_often_when_its_coordinator_says_so(house: House) -> None:
    await house.worker(flush_tokens=100, flush_interval_ms=20)
    house.coordinator.say(flush_interval=fleet_pb2.FlushInterval(least_s=60.0))
    house.coordinator.assign("a", Sampling(max_tokens=2000))
    await wait_until(lambda: house.coordinator.length("a") > 0, what="the first token is stored")
    early = house.coordinator.messages
    await wait_until(lambda: house.generated() > 300, what="three of its own windows are generated")
    assert house.coordinator.messages == early
    house.coordinator.say(flush_interval=fleet_pb2.FlushInterval())
    await wait_until(lambda: house.coordinator.length("a") > 300, what="its own window holds again")


async def test_a_heartbeat_says_at_once_that_generation_is_held_for_an_install(house: House) -> None:
    house.coordinator.heartbeat_s = 60.0
    await house.worker(version=0, script={"install_s": 0.1})
    house.coordinator.install(house.relay.publish(1))
    await house.coordinator.hear("installed")
    await wait_until(lambda: not house.coordinator.heard["heartbeat"][-1].held)
    beats = house.coordinator.heard["heartbeat"]
    assert not beats[0].held
    assert {WorkerState(beat.state) for beat in beats if beat.held} == {WorkerState.INSTALLING}


async def test_a_heartbeat_says_out_of_turn_that_a_slow_store_holds_generation(house: House) -> None:
    house.coordinator.heartbeat_s = 60.0
    await house.worker(flush_tokens=40)
    house.coordinator.assign("r1", Sampling(max_tokens=300))
    await house.hold_store("r1")
    await wait_until(lambda: house.coordinator.heard["heartbeat"][-1].held)
    house.coordinator.store_up.set()
    await wait_until(lambda: not house.coordinator.heard["heartbeat"][-1].held)
    await wait_until(lambda: "r1" in house.coordinator.finished)


async def test_quiet_grows_while_the_engine_owes_tokens_and_only_then(house: House) -> None:
    await house.worker(script={"stall_after_tokens": 30})
    beats = house.coordinator.heard["heartbeat"]
    assert beats[-1].quiet_s == 0.0, "without work nothing is owed"
    house.coordinator.assign("r1", Sampling(max_tokens=300))
    await wait_until(lambda: beats[-1].quiet_s > 0.4)
    assert not beats[-1].held
    assert house.generated() == 30
    release(house, "r1")
    await wait_until(lambda: "r1" in house.coordinator.released())
    await wait_until(lambda: beats[-1].quiet_s == 0.0)


async def test_a_worker_whose_engine_stalled_drops_its_attempts_and_works_again(
    house: House, expected: Expected
) -> None:
    await house.worker(script={"stall_at_s": 0.5, "stall_s": 1.0, "step_s": 0.005})
    house.coordinator.assign("r1", Sampling(max_tokens=4000))
    await wait_until(lambda: house.coordinator.heard["heartbeat"][-1].quiet_s > 0.3)
    house.coordinator.fences["r1"] = "another"
    house.coordinator.hang_up()
    await wait_until(lambda: len(house.coordinator.attaches) == 2)
    assert [held.attempt.rollout_id for held in house.coordinator.attaches[1].held] == ["r1"]
    await wait_until(lambda: house.in_engine() == 0)
    house.coordinator.assign("r2", Sampling(max_tokens=20))
    await wait_until(lambda: "r2" in house.coordinator.finished)
    assert house.coordinator.ids("r2") == expected(20)
    assert house.coordinator.released() == {}
