"""A lease renews itself, pushes back with the coordinator, and ends everything under it once it is lost."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from ebbtide.auth.security import ClientSecurity
from ebbtide.client import Client, Lease
from ebbtide.errors import InvalidRequest, LeaseSuperseded, NoCapacity, NotReady, StoreUnavailable, Unavailable
from ebbtide.types.ids import check_id
from ebbtide.types.rollout import RolloutRequest, SubmitOutcome
from ebbtide.types.run import RunEvent, Sampling
from tests.fakes.scripted_coordinator import TOKEN
from tests.support.waiting import wait_until


def rollout(name: str, tokens: int = 4) -> RolloutRequest:
    return RolloutRequest(
        rollout_id=name, group_id="g", episode_id=name, prompt_ids=bytes(4 * tokens), sampling=Sampling()
    )


async def test_a_lease_renews_itself_and_is_given_back(client: Client, script: Any) -> None:
    async with client.claim("run", holder="host-1") as lease:
        assert (lease.run_id, lease.role, lease.run.spec.name) == ("run", "trainer", "spell")
        await wait_until(lambda: len(script.calls("RenewLease")) >= 3, what="renewals")
    (claim,) = script.calls("ClaimRun")
    assert claim.holder == "host-1"
    assert len(script.calls("ReleaseLease")) == 1
    with pytest.raises(LeaseSuperseded, match="released"):
        await lease.acknowledge(["r"])


async def test_two_clients_without_names_are_two_holders_and_each_stays_the_same(
    client: Client, coordinator: Any, script: Any
) -> None:
    async with Client(coordinator.address, security=ClientSecurity(token=TOKEN)) as other:
        for one in (client, other, client):
            async with one.claim("run"):
                pass
    first, second, third = (call.holder for call in script.calls("ClaimRun"))
    assert first == third != second
    assert check_id(first, field="holder")


async def test_a_claim_waits_until_the_lease_is_free(client: Client, script: Any) -> None:
    script.free = False
    with pytest.raises(NotReady, match="held by another"):
        await client.acquire("run", wait=False)
    claim = asyncio.create_task(client.acquire("run"))
    await wait_until(lambda: len(script.calls("ClaimRun")) >= 3, what="repeated claims")
    script.free = True
    await (await claim).release()


async def test_renewals_outlive_a_coordinators_restart(client: Client, coordinator: Any, script: Any) -> None:
    async with client.claim("run") as lease:
        await coordinator.stop()
        await asyncio.wait({asyncio.create_task(lease.lost.wait())}, timeout=0.5)
        await coordinator.start()
        before = len(script.calls("RenewLease"))
        await wait_until(lambda: len(script.calls("RenewLease")) > before + 1, what="renewals")
        assert not lease.lost.is_set()


async def _next_finished(lease: Lease) -> None:
    await anext(lease.finished())


@pytest.mark.parametrize(
    "call",
    [
        lambda lease: lease.submit_rollouts([rollout("r")]),
        lambda lease: lease.acknowledge(["r"]),
        lambda lease: lease.publish({}, step=1),
        _next_finished,
    ],
)
async def test_a_superseded_lease_refuses_every_call(
    call: Callable[[Lease], Awaitable[Any]], client: Client, script: Any
) -> None:
    async with client.claim("run") as lease:
        script.fence = "fence-of-another"
        await wait_until(lease.lost.is_set, what="the loss")
        asked = len(script.asked)
        with pytest.raises(LeaseSuperseded, match="claimed by another"):
            await call(lease)
        assert len(script.asked) == asked
    assert not script.calls("ReleaseLease")


async def test_a_refused_call_loses_the_lease_before_the_next_renewal(client: Client, script: Any) -> None:
    script.ttl_s = 60.0
    async with client.claim("run") as lease:
        script.fence = "fence-of-another"
        with pytest.raises(LeaseSuperseded):
            await lease.submit_rollouts([rollout("r")])
        assert lease.lost.is_set()


async def test_a_stream_ends_when_its_lease_is_lost(client: Client, script: Any) -> None:
    script.finish(1)
    async with client.claim("run") as lease:
        finished = lease.finished()
        assert (await anext(finished)).rollout_id == "f1"
        waiting = asyncio.ensure_future(anext(finished))
        script.fence = "fence-of-another"
        with pytest.raises(LeaseSuperseded):
            await waiting


async def test_a_full_queue_is_waited_out_as_long_as_it_says(client: Client, script: Any) -> None:
    script.errors["Submit"] = [NoCapacity("full", retry_after_s=0.4), Unavailable("away")]
    async with client.claim("run") as lease:
        start = time.monotonic()
        assert await lease.submit_rollouts([rollout("a"), rollout("b")]) == [SubmitOutcome.ACCEPTED] * 2
        assert time.monotonic() - start >= 0.4
        assert len(script.calls("Submit")) == 3
        script.errors["Submit"] = [NoCapacity("full", retry_after_s=0.4)]
        with pytest.raises(NoCapacity):
            await lease.submit_rollouts([rollout("c")], wait=False)


async def test_submits_are_numbered_and_what_was_refused_comes_again_under_another_number(
    client: Client, script: Any
) -> None:
    script.errors["Submit"] = [NoCapacity("full", retry_after_s=0.01), Unavailable("away")]
    async with client.claim("run") as lease:
        await lease.submit_rollouts([rollout("a")])
        await lease.submit_rollouts([rollout("b")], step=3, first_step=2)
    asked = script.calls("Submit")
    assert [(one.sequence, one.settled) for one in asked] == [(1, 1), (2, 2), (2, 2), (3, 3)]
    assert [(one.HasField("step"), one.step, one.first_step) for one in asked[-2:]] == [(False, 0, 0), (True, 3, 2)]


async def test_waiting_for_capacity_ends_with_the_lease(client: Client, script: Any) -> None:
    script.errors["Submit"] = [NoCapacity("full", retry_after_s=60.0)]
    async with client.claim("run") as lease:
        submit = asyncio.ensure_future(lease.submit_rollouts([rollout("a")]))
        await wait_until(lambda: script.calls("Submit"), what="the refusal")
        script.fence = "fence-of-another"
        with pytest.raises(LeaseSuperseded):
            await submit


async def test_a_cancel_that_meets_the_leases_end_still_cancels(client: Client) -> None:
    for passes in range(4):
        async with client.claim("run") as lease:
            waiting = asyncio.create_task(lease._pause(60.0))
            await asyncio.sleep(0)
            lease.lost.set()
            for _ in range(passes):
                await asyncio.sleep(0)
            cancelled = waiting.cancel()
            await asyncio.wait({waiting})
            assert waiting.cancelled() == cancelled


async def test_large_submits_are_cut_below_the_size_of_a_message(client: Client, script: Any) -> None:
    script.ttl_s = 60.0
    rollouts = [rollout(f"r{i}", tokens=100_000) for i in range(12)] + [rollout(f"s{i}") for i in range(2000)]
    async with client.claim("run") as lease:
        outcomes = await lease.submit_rollouts(rollouts)
    assert len(outcomes) == 2012
    sent = [item.rollout_id for request in script.calls("Submit") for item in request.rollouts]
    assert sent == [item.rollout_id for item in rollouts]
    assert max(request.ByteSize() for request in script.calls("Submit")) < 3 << 20


async def test_what_a_store_may_have_forgotten_is_sent_again_in_order_and_once(client: Client, script: Any) -> None:
    script.durable_after_s, script.ttl_s = 30.0, 1.0
    lease = await client.acquire("run")
    await lease.submit_rollouts([rollout("a"), rollout("b")])
    await lease.acknowledge(["a"])
    await lease.report([RunEvent(kind="note")])
    before = len(script.asked)
    script.store_life = "second"
    script.errors["Acknowledge"] = [StoreUnavailable("the finish is not there again yet"), InvalidRequest("it is over")]
    await wait_until(lambda: len(script.calls("Report")) == 2, what="all of it again")
    calls = [name for name, _ in script.asked[before:] if name != "RenewLease"]
    assert calls == ["Submit", "Acknowledge", "Acknowledge", "Report"]
    assert script.calls("Submit")[0] == script.calls("Submit")[1]
    first, second = script.calls("Report")
    assert first == second
    assert first.events[0].key  # so that it is there once
    renewals = len(script.calls("RenewLease"))
    await wait_until(lambda: len(script.calls("RenewLease")) >= renewals + 3, what="renewals in the same life")
    assert len(script.calls("Submit")) == 2
    script.durable_after_s = 0.0
    await lease.release()


async def test_a_lease_is_renewed_while_much_is_sent_again(client: Client, script: Any) -> None:
    script.durable_after_s, script.ttl_s = 30.0, 0.9
    lease = await client.acquire("run")
    names = [f"r{number}" for number in range(24)]
    for name in names:
        await lease.submit_rollouts([rollout(name)])
    script.slow_s, script.store_life = 0.1, "second"
    before = len(script.asked)
    await wait_until(lambda: len(script.calls("Submit")) == 48, what="all of it again")
    sent = [name for name, _ in script.asked[before:]]
    assert max(len(part.split()) for part in " ".join(sent).split("RenewLease")) <= 4  # of 0.1 s, in 0.3 s
    again = [request.rollouts[0].rollout_id for request in script.calls("Submit")[24:]]
    assert again == names
    script.durable_after_s = 0.0
    await lease.release()


async def test_a_call_that_hangs_as_it_is_sent_again_does_not_cost_the_lease(client: Client, script: Any) -> None:
    script.durable_after_s, script.ttl_s = 30.0, 0.9
    lease = await client.acquire("run")
    await lease.submit_rollouts([rollout("a")])
    script.slow_s, script.store_life = 60.0, "second"
    await wait_until(lambda: len(script.calls("Submit")) == 2, what="it is sent again")
    renewals = len(script.calls("RenewLease"))
    await wait_until(lambda: len(script.calls("RenewLease")) > renewals, 5.0, what="it is renewed")
    script.slow_s = 0.0
    await wait_until(lambda: not lease._journal.owed(), what="it is there again")
    script.durable_after_s = 0.0
    await lease.release()


async def test_a_lease_is_given_back_when_all_that_was_done_under_it_is_durable(client: Client, script: Any) -> None:
    script.durable_after_s = 0.5
    lease = await client.acquire("run")
    await lease.submit_rollouts([rollout("a")])
    began = time.monotonic()
    await lease.release()
    assert time.monotonic() - began >= 0.45
    assert len(script.calls("ReleaseLease")) == 1
