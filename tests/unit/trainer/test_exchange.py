"""The driver's traffic: batches, refusals that hit one item, and quotas that are full."""

import asyncio
from typing import Any

import pytest

from ebbtide.driver import coordinator_traffic as module
from ebbtide.driver.coordinator_traffic import AlreadyCompleted, CallBatches, CoordinatorTraffic
from ebbtide.errors import InvalidRequest
from ebbtide.run_client import RunFailed
from ebbtide.runtime import race
from ebbtide.types.rollout import Episode, RolloutRequest
from ebbtide.types.run import EnvironmentSpec, RunSpec, Sampling
from ebbtide.types.tokens import pack_ids
from tests.support.waiting import wait_until

SPEC = RunSpec(name="run", model="model", environment=EnvironmentSpec(name="none"))


def request(name: str, *, step: int = 0, prompt: int = 7) -> RolloutRequest:
    return RolloutRequest(
        rollout_id=name,
        group_id="g",
        episode_id=name,
        prompt_ids=pack_ids([prompt]),
        sampling=Sampling(),
        priority=step,
    )


@pytest.fixture
def cluster(make_cluster: Any) -> Any:
    made = make_cluster(SPEC, lambda request: [1, 2])
    made.announce(0)
    return made


async def with_exchange(cluster: Any, work: Any) -> CoordinatorTraffic:
    """Run `work(exchange)` while the exchange runs; only step 0 is urgent."""
    made = CoordinatorTraffic(cluster.lease("driver"), lambda request: request.priority == 0)
    async with asyncio.timeout(5):
        await race(work(made), made.run())
    return made


async def test_what_is_put_at_one_time_is_sent_together_and_answered_in_order() -> None:
    sent: list[list[int]] = []

    async def send(items: list[int]) -> list[int]:
        sent.append(items)
        await asyncio.sleep(0)
        return [item * 10 for item in items]

    batches: CallBatches[int, int] = CallBatches(send)
    answers: list[int] = []

    async def work() -> None:
        answers.extend(await asyncio.gather(*(batches.put(item) for item in range(5))))

    await race(work(), batches.run())
    assert answers == [0, 10, 20, 30, 40]
    assert len(sent) <= 2


async def test_one_bad_item_fails_alone(cluster: Any) -> None:
    outcomes: list[Any] = []

    async def work(exchange: CoordinatorTraffic) -> None:
        await exchange.generate(request("taken"))
        others = [request("fine"), request("taken", prompt=8), request("too")]
        outcomes.extend(await asyncio.gather(*map(exchange.generate, others), return_exceptions=True))

    await with_exchange(cluster, work)
    assert [type(outcome).__name__ for outcome in outcomes] == ["FinishedRollout", "AlreadyExists", "FinishedRollout"]


async def test_a_refusal_by_the_coordinator_reaches_who_asked(cluster: Any) -> None:
    async def refuse(items: list[str]) -> list[str]:
        if "bad" in items:
            raise InvalidRequest("too long", field="prompt_ids")
        return items

    batches: CallBatches[str, str] = CallBatches(refuse)
    found: list[Any] = []

    async def work() -> None:
        found.extend(await asyncio.gather(*map(batches.put, ["a", "bad", "b"]), return_exceptions=True))

    await race(work(), batches.run())
    assert found[0] == "a"
    assert isinstance(found[1], InvalidRequest)
    assert found[2] == "b"


async def test_what_a_predecessor_completed_is_told(cluster: Any) -> None:
    cluster.rollouts["done"] = request("done")
    cluster.over.add("done")

    async def work(exchange: CoordinatorTraffic) -> None:
        with pytest.raises(AlreadyCompleted):
            await exchange.generate(request("done"))

    await with_exchange(cluster, work)


async def test_finishes_nobody_asked_for_are_kept_and_used_when_asked(cluster: Any) -> None:
    await cluster.lease("driver").submit_rollouts([request("early"), request("unasked")])

    async def work(exchange: CoordinatorTraffic) -> None:
        await wait_until(lambda: set(exchange.orphans) == {"early", "unasked"})
        assert (await exchange.generate(request("early"))).rollout_id == "early"

    assert set((await with_exchange(cluster, work)).orphans) == {"unasked"}


async def test_a_full_quota_is_waited_out(cluster: Any) -> None:
    refusals = [True, True, False]
    cluster.full = lambda rollouts: refusals.pop(0)

    async def work(exchange: CoordinatorTraffic) -> None:
        await exchange.generate(request("r"))
        await exchange.complete([Episode(episode_id="r", rollout_ids=("r",), drop_reason="cancelled")])

    await with_exchange(cluster, work)
    assert refusals == []


async def test_what_is_submitted_ahead_waits_for_room_without_holding_up_what_is_urgent(cluster: Any) -> None:
    cluster.full = lambda rollouts: any(item.priority for item in rollouts)

    async def work(exchange: CoordinatorTraffic) -> None:
        ahead = asyncio.create_task(exchange.generate(request("ahead", step=1)))
        await wait_until(lambda: "driver:submit" in cluster.log)
        await exchange.generate(request("now", step=0))
        assert not ahead.done()
        cluster.full = lambda rollouts: False
        await ahead

    await with_exchange(cluster, work)


async def test_a_quota_that_cannot_hold_a_step_fails_the_run_with_the_remedy(
    cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_FULL_S", 0.05)
    cluster.full = lambda rollouts: True

    async def work(exchange: CoordinatorTraffic) -> None:
        await exchange.generate(request("r"))

    with pytest.raises(RunFailed, match="quota_bytes must hold"):
        await with_exchange(cluster, work)
