"""Clients' keys with limits: one account in each run, whatever gateways take their requests and whoever dies."""

from typing import Any

import pytest

from ebbtide.client import GatewayLease
from ebbtide.coordinator.api import key_accounts
from ebbtide.errors import BudgetSpent, InvalidRequest, NoCapacity, RateLimited
from ebbtide.store.scripts import run_key
from ebbtide.types.rollout import RolloutRequest, SubmitOutcome
from ebbtide.types.run import Sampling
from ebbtide.types.session import KeyLimits, KeyUsage, MeteredKey, SessionTurn
from ebbtide.v1 import rollouts_pb2, runs_pb2, types_pb2
from tests.integration.coordinator.gateways import OWNER, answer, asked, gateway
from tests.integration.coordinator.test_scored_requests import SCORES, score, scores, to_score
from tests.support.waiting import wait_until

STOP = types_pb2.FINISH_REASON_STOP
ACCEPTED, KNOWN = SubmitOutcome.ACCEPTED, SubmitOutcome.KNOWN


def key(**limits: int) -> MeteredKey:
    return MeteredKey(owner=OWNER, limits=KeyLimits(**limits))


def request(name: str, most: int = 10, number: int = 0, **more: Any) -> RolloutRequest:
    """A completion of a request `name` with a prompt of 3 tokens and at most `most` of its own."""
    return asked(f"{name}-{number}", group_id=name, sampling=Sampling(max_tokens=most), **more)


async def usage(lease: GatewayLease) -> KeyUsage:
    return await lease.key_usage(OWNER)


async def test_a_budget_holds_over_two_gateways_and_is_settled_by_what_was_made(cluster: Any) -> None:
    await cluster.run()
    limited = key(tokens=30)
    async with gateway(cluster, "g1") as first, gateway(cluster, "g2") as second:
        assert await first.submit_rollouts([request("a")], key=limited) == [ACCEPTED]
        assert await second.submit_rollouts([request("b")], key=limited) == [ACCEPTED]
        with pytest.raises(RateLimited, match="key of user-a is at a limit on run r: requests under way"):
            await first.submit_rollouts([request("c")], key=limited)
        assert await usage(second) == KeyUsage(owner=OWNER, requests=2, requests_open=2, tokens_reserved=26)
        worker = await cluster.worker("w1", slots=1)
        await worker.has("a-0")
        await worker.add("a-0", 0, 2, STOP)
        await answer(first, "a-0")
        assert await usage(first) == KeyUsage(
            owner=OWNER, requests=2, requests_open=1, tokens=5, tokens_today=5, tokens_reserved=13
        )
        assert await second.submit_rollouts([request("c", most=9)], key=limited) == [ACCEPTED]
        with pytest.raises(BudgetSpent, match="has used 5 of its 30 tokens, and this request may take 33"):
            await second.submit_rollouts([request("d", most=30)], key=limited)


async def test_a_repeat_is_taken_at_any_limit_and_costs_nothing(cluster: Any) -> None:
    await cluster.run()
    limited = key(tokens=13, requests_per_minute=1, requests_at_once=1)
    async with gateway(cluster, "g1") as first, gateway(cluster, "g2") as second:
        assert await first.submit_rollouts([request("a")], key=limited) == [ACCEPTED]
        assert await second.submit_rollouts([request("a")], key=limited) == [KNOWN]
        with pytest.raises(RateLimited, match="1 requests at once"):
            await second.submit_rollouts([request("b")], key=limited)
        await first.cancel_rollouts(["a-0"])
        assert await usage(first) == KeyUsage(owner=OWNER, requests=1), "no engine has read its prompt"
        with pytest.raises(RateLimited, match="1 requests a minute") as refused:
            await second.submit_rollouts([request("b")], key=limited)
        assert 50 < refused.value.retry_after_s <= 60
        assert await second.submit_rollouts([request("a")], key=limited) == [KNOWN]


async def test_completions_of_one_request_count_its_prompt_once_and_are_one_request(cluster: Any) -> None:
    await cluster.run()
    async with gateway(cluster) as lease:
        both = [request("a", number=0), request("a", number=1)]
        assert await lease.submit_rollouts(both, key=key(requests_at_once=1)) == [ACCEPTED, ACCEPTED]
        assert await usage(lease) == KeyUsage(owner=OWNER, requests=1, requests_open=1, tokens_reserved=23)
        await lease.cancel_rollouts(["a-0"])
        assert (await usage(lease)).requests_open == 1
        await lease.cancel_rollouts(["a-1"])
        assert await usage(lease) == KeyUsage(owner=OWNER, requests=1)


async def test_an_account_outlives_its_coordinator(cluster: Any) -> None:
    await cluster.run()
    limited = key(tokens=20)
    async with gateway(cluster) as lease:
        await lease.submit_rollouts([request("a")], key=limited)
        await cluster.restart()
    async with gateway(cluster) as lease:
        with pytest.raises(RateLimited):
            await lease.submit_rollouts([request("b")], key=limited)
        worker = await cluster.worker("w1")
        await worker.has("a-0")
        await worker.add("a-0", 0, 4, STOP)
        await answer(lease, "a-0")
        assert await lease.submit_rollouts([request("b")], key=limited) == [ACCEPTED]


async def test_a_turn_that_its_key_has_no_room_for_is_not_stored(cluster: Any) -> None:
    await cluster.run()
    limited = key(tokens=20)
    turn = SessionTurn(request_id="t1", rollout_ids=("t1-0",), record=b"x")
    async with gateway(cluster) as lease:
        await lease.open_session("s", OWNER)
        with pytest.raises(BudgetSpent):
            await lease.add_turn("s", OWNER, turn, key=limited, tokens=21)
        assert (await lease.read_turns("s", OWNER)).session.turns == 0
        await lease.add_turn("s", OWNER, turn, key=limited, tokens=13)
        rollout = request("t1", episode_id="s")
        assert await lease.submit_rollouts([rollout], key=limited) == [ACCEPTED]
        assert (await lease.add_turn("s", OWNER, turn, key=limited, tokens=13)).number == 1, "a repeat is free"


async def test_a_scored_prompt_spends_its_tokens_and_not_its_scores(cluster: Any) -> None:
    await cluster.run()
    worker = await cluster.worker("w1", **SCORES)
    async with gateway(cluster) as lease:
        await lease.submit_rollouts([to_score("a")], key=key(tokens=10))
        await worker.has("a")
        await score(worker, "a", scores())
        await answer(lease, "a")
        assert await usage(lease) == KeyUsage(owner=OWNER, requests=1, tokens=4, tokens_today=4)
        assert await lease.submit_rollouts([to_score("b")], key=key(tokens=10)) == [ACCEPTED]


async def test_a_request_gives_back_no_debt_that_time_has_paid_off(cluster: Any) -> None:
    await cluster.run()
    limited = key(tokens_per_minute=100)
    async with gateway(cluster) as lease:
        await lease.submit_rollouts([request("old", most=97)], key=limited)
        await pass_for_key(cluster, "old-0", 60.0)
        await lease.submit_rollouts([request("new", most=97)], key=limited)
        await lease.cancel_rollouts(["old-0"])
        with pytest.raises(RateLimited):
            await lease.submit_rollouts([request("more", most=97)], key=limited)
        await lease.cancel_rollouts(["new-0"])  # of its debt time has paid off next to nothing
        await lease.submit_rollouts([request("more", most=7)], key=limited)
        await lease.submit_rollouts([request("most", most=77)], key=limited)


async def pass_for_key(cluster: Any, rollout_id: str, seconds: float) -> None:
    """Have the key's debts, and the charge of one rollout, be older."""
    link, ms = cluster.coordinator.link, round(seconds * 1000)
    for hashed, field in ((run_key("r", "ACCOUNTS"), f"{OWNER}:at"), (run_key("r", "ROLLOUT", rollout_id), "charged")):
        if await link.call("HEXISTS", hashed, field):
            await link.call("HINCRBY", hashed, field, -ms)


async def test_the_repeat_of_a_stored_turn_is_answered_at_any_limit(cluster: Any) -> None:
    await cluster.run()
    limited = key(tokens=30)
    turn = SessionTurn(request_id="t1", rollout_ids=("t1-0",), record=b"x")
    async with gateway(cluster, "g1") as first, gateway(cluster, "g2") as second:
        await first.open_session("s", OWNER)
        await first.add_turn("s", OWNER, turn, key=limited, tokens=20)
        await second.submit_rollouts([request("b", most=17)], key=limited)
        assert (await first.add_turn("s", OWNER, turn, key=limited, tokens=20)).number == 1
        other = SessionTurn(request_id="t2", rollout_ids=("t2-0",), record=b"x")
        with pytest.raises(RateLimited):
            await first.add_turn("s", OWNER, other, key=limited, tokens=20)


async def test_a_turn_opens_no_account_beyond_the_bound(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_accounts, "_MOST_ACCOUNTS", 0)
    await cluster.run()
    turn = SessionTurn(request_id="t1", rollout_ids=("t1-0",), record=b"x")
    async with gateway(cluster) as lease:
        await lease.open_session("s", OWNER)
        with pytest.raises(NoCapacity, match="0 keys with limits"):
            await lease.add_turn("s", OWNER, turn, key=key(tokens=30), tokens=20)
        assert (await lease.read_turns("s", OWNER)).session.turns == 0


async def test_an_owner_is_told_of_its_own_account_alone(cluster: Any) -> None:
    await cluster.run()
    limits = KeyLimits(tokens=100)
    async with gateway(cluster) as lease:
        await lease.submit_rollouts([request("a")], key=MeteredKey(owner="user-a", limits=limits))
        await lease.submit_rollouts([request("b")], key=MeteredKey(owner="user-b", limits=limits))
    asked = rollouts_pb2.ListKeyUsageRequest
    for owner, told in (("user-b", ["user-b"]), ("", ["user-a", "user-b"]), ("user-c", [])):
        found = (await cluster.call(cluster.rollouts.ListKeyUsage, asked(run_id="r", owner=owner))).usage
        assert [(one.owner, one.requests_open, one.tokens_reserved) for one in found] == [(one, 1, 13) for one in told]


async def test_accounts_end_with_their_run_and_only_gateways_have_clients(cluster: Any) -> None:
    await cluster.run()
    async with gateway(cluster) as lease:
        await lease.submit_rollouts([request("a")], key=key(tokens=100))
        with pytest.raises(InvalidRequest, match=r"key\.owner"):
            await lease.submit_rollouts([request("b")], key=MeteredKey(owner="a b"))
    link = cluster.coordinator.link
    assert await link.call("TTL", run_key("r", "ACCOUNTS")) == -1
    await cluster.call(cluster.runs.CancelRun, runs_pb2.CancelRunRequest(run_id="r"))
    asking = rollouts_pb2.ListKeyUsageRequest(run_id="r")
    (used,) = (await cluster.call(cluster.rollouts.ListKeyUsage, asking)).usage
    assert (used.requests, used.requests_open, used.tokens_reserved) == (1, 0, 0)

    async def expires() -> bool:
        return bool(await link.call("TTL", run_key("r", "ACCOUNTS")) > 0)

    await wait_until(expires)
