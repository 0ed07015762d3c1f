"""Sessions that end with a verifier wait for its verdict, whoever dies meanwhile, and not for ever."""

import contextlib
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import pytest
from msgspec.structs import replace

from ebbtide.auth.security import ClientSecurity
from ebbtide.client import Client, GatewayLease, Lease
from ebbtide.errors import InvalidRequest, NotFound, NotReady
from ebbtide.store.scripts import run_key
from ebbtide.types.rollout import Trajectory
from ebbtide.types.session import SessionEnd, SessionState, SessionTurn, UnverifiedSession
from ebbtide.v1 import types_pb2
from tests.integration.coordinator.conftest import TOKEN, Cluster
from tests.integration.coordinator.gateways import OWNER, asked, branch, gateway, pass_time

STOP = types_pb2.FINISH_REASON_STOP
OPEN, VERIFYING = SessionState.OPEN, SessionState.VERIFYING
DONE, DROPPED = SessionState.COMPLETED, SessionState.DROPPED


@contextlib.asynccontextmanager
async def driver(cluster: Cluster) -> AsyncIterator[Lease]:
    async with Client(cluster.server.address, security=ClientSecurity(token=TOKEN), patience_s=10.0) as client:
        lease = await client.acquire("r", "driver", holder="driver")
        try:
            yield lease
        finally:
            lease._renewals.cancel()  # as a process that dies


def judged(session_id: str, *branches: Trajectory, data: bytes = b"") -> SessionEnd:
    return SessionEnd(session_id=session_id, owner=OWNER, trajectories=branches, verifier="exact", data=data)


async def waiting(lease: GatewayLease, session_id: str, *, tokens: int = 0) -> None:
    """Open a session with a completion, and end it. `tokens`: of its prompt, to be as large as that."""
    await lease.open_session(session_id, OWNER)
    rollout = f"{session_id}-q"
    await lease.add_turn(session_id, OWNER, SessionTurn(request_id=f"{session_id}-t", rollout_ids=(rollout,)))
    await lease.submit_rollouts([asked(rollout, episode_id=session_id)])
    made = branch(f"{session_id}.0", 1)
    made = replace(made, prompt_ids=bytes(4 * tokens) or made.prompt_ids, reward=0.0)
    ended = await lease.end_session(judged(session_id, made, data=b'{"answer":"x"}'))
    assert (ended.state, ended.verifier, ended.reward) == (VERIFYING, "exact", None)


async def unverified(lease: Lease, count: int = 1) -> list[UnverifiedSession]:
    found = list[UnverifiedSession]()
    async with aclosing(lease.unverified()) as sessions:
        async for one in sessions:
            found.append(one)
            if len(found) == count:
                break
    return found


async def test_a_verdict_makes_trajectories_with_its_reward_once(cluster: Any) -> None:
    run = await cluster.run()
    async with gateway(cluster) as lease, driver(cluster) as judge:
        await waiting(lease, "s")
        assert await run.count("submitted") == 0, "nothing is to be trained on yet"
        (found,) = await unverified(judge)
        assert (found.session_id, found.verifier, found.data) == ("s", "exact", b'{"answer":"x"}')
        assert [(one.episode_id, one.reward) for one in found.trajectories] == [("s.0", 0.0)]
        ended = await judge.post_verdict("s", reward=0.75)
        assert (ended.state, ended.reward) == (DONE, 0.75)
        again = await judge.post_verdict("s", drop_reason="late")
        assert (again.state, again.reward) == (DONE, 0.75)
        (trajectory,) = await run.trajectories(1)
        assert (trajectory.episode_id, trajectory.reward, trajectory.rollouts) == ("s.0", 0.75, 1)
        assert (await lease.read_turns("s", OWNER)).session.reward == 0.75
        assert await run.count("submitted") == 1
    assert await cluster.coordinator.link.call("XLEN", run_key("r", "UNVERIFIED")) == 0


async def test_a_verifier_that_fails_drops_the_session_with_its_reason(cluster: Any) -> None:
    run = await cluster.run()
    async with gateway(cluster) as lease, driver(cluster) as judge:
        await waiting(lease, "s")
        ended = await judge.post_verdict("s", drop_reason="verifier_failed")
        assert (ended.state, ended.drop_reason, ended.reward) == (DROPPED, "verifier_failed", None)
        with pytest.raises(NotFound):
            await judge.post_verdict("never", reward=1.0)
    assert await run.count("submitted") == 0


async def test_a_session_that_waits_takes_no_turn_and_no_other_end(cluster: Any) -> None:
    await cluster.run()
    async with gateway(cluster, "g1") as lease, gateway(cluster, "g2") as other:
        await waiting(lease, "s")
        with pytest.raises(NotReady, match="has ended"):
            await other.add_turn("s", OWNER, SessionTurn(request_id="t2", rollout_ids=("q2",)))
        dropped = SessionEnd(session_id="s", owner=OWNER, drop_reason="x")
        assert (await other.end_session(dropped)).state is VERIFYING
        unknown = judged("s2")
        await other.open_session("s2", OWNER)
        with pytest.raises(InvalidRequest, match="drop_reason: give either"):
            await other.end_session(unknown)
        with pytest.raises(InvalidRequest, match="data: is for the last"):
            await other.end_session(SessionEnd(session_id="s2", owner=OWNER, drop_reason="x", data=b"{}"))


async def test_what_waits_comes_again_to_the_next_driver_and_the_next_coordinator_in_its_order(cluster: Any) -> None:
    await cluster.run()
    async with gateway(cluster) as lease:
        for name in ("s1", "s2"):
            await waiting(lease, name)
        async with driver(cluster) as judge:
            assert [one.session_id for one in await unverified(judge, 2)] == ["s1", "s2"]
    await cluster.restart()
    async with driver(cluster) as judge:
        assert [one.session_id for one in await unverified(judge, 2)] == ["s1", "s2"]
        await judge.post_verdict("s1", reward=1.0)
        assert [one.session_id for one in await unverified(judge)] == ["s2"]


async def test_a_session_larger_than_a_message_arrives_whole(cluster: Any) -> None:
    await cluster.run()
    large = 400_000  # tokens: 1.6 MB each
    async with gateway(cluster) as lease, driver(cluster) as judge:
        await lease.open_session("s", OWNER)
        rollouts = tuple(f"q-{number}" for number in range(4))
        await lease.add_turn("s", OWNER, SessionTurn(request_id="t", rollout_ids=rollouts))
        branches = [replace(branch(f"s.{number}", 1), prompt_ids=bytes(4 * large)) for number in range(4)]
        assert (await lease.end_session(judged("s", *branches))).state is VERIFYING
        (found,) = await unverified(judge)
        assert sorted(found.trajectories, key=lambda one: one.episode_id) == branches


async def test_a_session_that_no_driver_judges_is_dropped_after_its_time(cluster: Any) -> None:
    await cluster.run()
    async with gateway(cluster) as lease:
        await waiting(lease, "s")
        before = (await lease.read_turns("s", OWNER)).session
        assert before.ends_in_s > 0
        await pass_time(cluster, before.ends_in_s + 1)
        session = (await lease.read_turns("s", OWNER)).session
        assert (session.state, session.drop_reason) == (DROPPED, "unverified")
    assert await cluster.coordinator.link.call("XLEN", run_key("r", "UNVERIFIED")) == 0


async def test_only_the_runs_own_roles_judge(cluster: Any) -> None:
    await cluster.run()
    async with gateway(cluster) as lease, driver(cluster) as judge:
        await waiting(lease, "s")
        judge._fence.CopyFrom(lease._fence)
        with pytest.raises(InvalidRequest, match=r"lease\.role"):
            await judge.post_verdict("s", reward=1.0)
