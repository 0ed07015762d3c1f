"""Sessions of gateways' clients: any gateway goes on where another died. They end as trajectories, or dropped."""

import asyncio
from typing import Any

import msgspec
import pytest

from ebbtide.client import GatewayLease
from ebbtide.coordinator import metrics
from ebbtide.errors import AlreadyExists, InvalidRequest, LeaseSuperseded, NoCapacity, NotFound, NotReady
from ebbtide.types.rollout import SampledResponse, SubmitOutcome, Trajectory
from ebbtide.types.run import LeaseRef, Sampling
from ebbtide.types.session import MAX_TURN_RECORD, SessionEnd, SessionState, SessionTurn
from ebbtide.v1 import sessions_pb2, sessions_pb2_grpc, types_pb2
from ebbtide.wire import from_proto
from tests.fakes.scripted_worker import tokens
from tests.integration.coordinator.gateways import OWNER, answer, asked, branch, gateway, keys, pass_time
from tests.support.waiting import wait_until

STOP = types_pb2.FINISH_REASON_STOP
ACCEPTED, KNOWN, COMPLETED = SubmitOutcome.ACCEPTED, SubmitOutcome.KNOWN, SubmitOutcome.COMPLETED
OPEN, DONE, DROPPED = SessionState.OPEN, SessionState.COMPLETED, SessionState.DROPPED


def turn(request_id: str, *rollout_ids: str, record: bytes = b"") -> SessionTurn:
    return SessionTurn(request_id=request_id, rollout_ids=rollout_ids, record=record or request_id.encode())


def drop(session_id: str, reason: str, **more: Any) -> SessionEnd:
    return SessionEnd(session_id=session_id, owner=OWNER, drop_reason=reason, **more)


def lease_ref(lease: GatewayLease) -> LeaseRef:
    return LeaseRef(lease.run_id, lease.role, lease._fence.fence, lease.number)


def completed(session_id: str, *rollouts: int) -> SessionEnd:
    """As a branch for each number of rollouts."""
    branches = [branch(f"{session_id}.{number}", counted) for number, counted in enumerate(rollouts)]
    return SessionEnd(session_id=session_id, owner=OWNER, trajectories=tuple(branches))


def answered(session_id: str, *places: tuple[int, int]) -> SessionEnd:
    """As one branch of two tokens, with responses at these places."""
    responses = tuple(SampledResponse(start=start, end=end, sampling=Sampling()) for start, end in places)
    made = msgspec.structs.replace(branch(session_id, 1), responses=responses)
    return SessionEnd(session_id=session_id, owner=OWNER, trajectories=(made,))


async def test_a_session_and_a_turn_are_made_once_whoever_asks_again(cluster: Any) -> None:
    await cluster.run()
    async with gateway(cluster, "g1") as one, gateway(cluster, "g2") as other:
        opened = await one.open_session("s", OWNER, group_id="g7", record=b"first")
        again = await other.open_session("s", OWNER, group_id="other", record=b"second")
        assert (opened.group_id, opened.record, opened.state) == ("g7", b"first", OPEN)
        assert (again.group_id, again.record, again.turns) == ("g7", b"first", 0)
        assert (await one.add_turn("s", OWNER, turn("t1", "q-1"))).number == 1
        repeat = await other.add_turn("s", OWNER, turn("t1", "q-9", record=b"else"))
        assert (repeat.number, repeat.rollout_ids, repeat.record) == (1, ("q-1",), b"t1")
        numbers = await asyncio.gather(*(
            lease.add_turn("s", OWNER, turn(f"t{n}", f"q-{n}")) for n in range(2, 12) for lease in (one, other)
        ))  # fmt: skip
        assert sorted({found.number for found in numbers}) == list(range(2, 12))
        page = await one.read_turns("s", OWNER)
        assert [found.number for found in page.turns] == list(range(1, 12))
        assert (page.session.turns, page.session.record, page.more) == (11, b"first", False)
        assert {found.request_id: found.number for found in numbers} == {
            found.request_id: found.number for found in page.turns[1:]
        }


async def test_the_session_of_another_owner_is_not_there(cluster: Any) -> None:
    await cluster.run()
    async with gateway(cluster) as lease:
        await lease.open_session("s", OWNER)
        await lease.open_session("s2", "user-b")
        stranger = "user-b"
        for call in (
            lease.open_session("s", stranger), lease.add_turn("s", stranger, turn("t")),
            lease.read_turns("s", stranger), lease.read_turns("never", OWNER),
            lease.end_session(SessionEnd(session_id="s", owner=stranger, drop_reason="x")),
        ):  # fmt: skip
            with pytest.raises(NotFound, match="there is no session"):
                await call
        assert [one.session_id for one in await lease.sessions(stranger)] == ["s2"]
        assert (await lease.read_turns("s", OWNER)).session.state is OPEN


async def test_a_trainer_reads_sessions_of_all_owners_and_changes_none(cluster: Any) -> None:
    run = await cluster.run()
    stub: Any = sessions_pb2_grpc.SessionsStub(cluster.channel)
    async with gateway(cluster) as lease:
        for name in ("s1", "s2", "s3"):
            await lease.open_session(name, f"owner-of-{name}", record=b"note")
        await lease.add_turn("s1", "owner-of-s1", turn("t1", "q-1"))
        listing = sessions_pb2.ListSessionsRequest(lease=run.lease, page_size=2)
        first = await cluster.call(stub.ListSessions, listing)
        assert [(one.session_id, one.record) for one in first.sessions] == [("s1", b""), ("s2", b"")]
        listing.cursor = first.next
        rest = await cluster.call(stub.ListSessions, listing)
        assert ([one.session_id for one in rest.sessions], rest.next) == (["s3"], "")
        page = await cluster.call(stub.ReadTurns, sessions_pb2.ReadTurnsRequest(lease=run.lease, session_id="s1"))
        assert [one.rollout_ids for one in page.turns] == [["q-1"]]
        asking = sessions_pb2.EndSessionRequest(lease=run.lease, session_id="s1", owner="owner-of-s1", drop_reason="x")
        with pytest.raises(InvalidRequest, match="only a gateway's lease"):
            await cluster.call(stub.EndSession, asking)
        asking.lease.CopyFrom(lease._fence)
        asking.lease.fence = "old"
        for call in (
            cluster.call(stub.EndSession, asking),
            cluster.call(stub.ReadTurns, sessions_pb2.ReadTurnsRequest(lease=asking.lease, session_id="s1", owner="o")),
        ):
            with pytest.raises(LeaseSuperseded):
                await call


async def test_a_gateway_goes_on_where_another_died_between_a_turn_and_its_submit(cluster: Any) -> None:
    run = await cluster.run()
    async with gateway(cluster, "g1") as lease:
        await lease.open_session("s", OWNER)
        await lease.add_turn("s", OWNER, turn("t1", "q-1-0", "q-1-1", record=b"its prompt"))
    await cluster.restart()
    worker = await cluster.worker("w1")
    async with gateway(cluster, "g2") as lease:
        (found,) = (await lease.read_turns("s", OWNER)).turns
        assert found.record == b"its prompt"
        wanted = [asked(rollout_id) for rollout_id in found.rollout_ids]
        assert await lease.submit_rollouts(wanted) == [ACCEPTED, ACCEPTED]
        await worker.has("q-1-0", "q-1-1")
        await worker.add("q-1-0", 0, 3, STOP)
        assert await lease.submit_rollouts(wanted) == [KNOWN, KNOWN]
        assert (await answer(lease, "q-1-0"))[0] == tokens(0, 3)
    assert await run.count("requests_submitted") == 2


async def test_the_rollouts_of_a_session_are_kept_as_long_as_it_is_and_no_longer(cluster: Any) -> None:
    run, worker = await cluster.run(), await cluster.worker("w1", slots=2)
    async with gateway(cluster) as lease:
        await lease.open_session("s", OWNER)
        await lease.add_turn("s", OWNER, turn("t1", "done", "going", "waiting", "unsent"))
        await lease.submit_rollouts([asked("done"), asked("going"), asked("waiting")])
        await worker.has("done", "going")
        await worker.add("done", 0, 4, STOP)
        await worker.has("waiting")
        await pass_time(cluster, 3000)
        assert (await answer(lease, "done"))[0] == tokens(0, 4)
        await lease.end_session(drop("s", "not_wanted"))
        await wait_until(lambda: sorted(worker.cancelled) == ["going", "waiting"])
        await cluster.coordinator.retention.round()
        for rollout_id in ("done", "going"):
            with pytest.raises(NotFound):
                await answer(lease, rollout_id)
        assert await lease.submit_rollouts([asked("done"), asked("unsent")]) == [COMPLETED, COMPLETED]
        ended = (await lease.read_turns("s", OWNER)).session
        assert (ended.state, ended.drop_reason, ended.turns) == (DROPPED, "not_wanted", 1)
        assert await keys(cluster) == {"session:s", "sessions", "over", "gateways", "gone"}
        await pass_time(cluster, 601)
        assert await keys(cluster) == {"gateways", "gone"}
        with pytest.raises(NotReady, match="has ended, and was forgotten"):
            await lease.open_session("s", OWNER)
        await pass_time(cluster, 601)
        assert await keys(cluster) == {"gateways"}
    counters = (await run.get()).counters
    assert [counters[name] for name in ("bytes", "running", "finished", "sessions_dropped")] == [0, 0, 0, 1]


async def test_a_session_that_becomes_trajectories_enters_the_accounts_of_training_only_then(cluster: Any) -> None:
    run, worker = await cluster.run(), await cluster.worker("w1")
    async with gateway(cluster) as lease:
        await lease.open_session("s", OWNER)
        await lease.add_turn("s", OWNER, turn("t1", "a"))
        await lease.add_turn("s", OWNER, turn("t2", "b"))
        await lease.add_turn("s", OWNER, turn("retry", "c"))
        await lease.submit_rollouts([asked(name) for name in "abc"])
        await worker.has(*"abc")
        for name in "abc":
            await worker.add(name, 0, 4, STOP)
        assert await run.count("submitted") == 0
        with pytest.raises(InvalidRequest, match=r"count for more rollouts than the session has \(3\)"):
            await lease.end_session(completed("s", 2, 2))
        ended = await lease.end_session(completed("s", 2, 1))
        assert (ended.state, ended.turns) == (DONE, 3)
        again = await lease.end_session(drop("s", "too_late"))
        assert (again.state, again.drop_reason) == (DONE, "")
        with pytest.raises(NotReady, match="session s has ended"):
            await lease.add_turn("s", OWNER, turn("t4", "d"))
    found = await run.trajectories(2)
    assert [(one.episode_id, one.rollouts) for one in found] == [("s.0", 2), ("s.1", 1)]
    with pytest.raises(NotReady, match="3 training rollouts"):
        await run.finish()
    await run.commit(found[0].cursor)
    await run.commit(found[1].cursor, drop="too_stale")
    counters = (await run.finish()).counters
    names = ("submitted", "trained", "dropped", "requests_submitted", "sessions_completed", "trajectories")
    assert [counters[name] for name in names] == [3, 2, 1, 3, 1, 0]


async def test_a_trajectory_says_how_each_of_its_responses_was_sampled(cluster: Any) -> None:
    run, ways = await cluster.run(), (Sampling(temperature=0.5, top_k=7), Sampling(top_p=0.9, stop_token_ids=(5,)))
    responses = tuple(SampledResponse(start=at, end=at + 1, sampling=one) for at, one in enumerate(ways))
    async with gateway(cluster) as lease:
        await lease.open_session("s", OWNER)
        await lease.add_turn("s", OWNER, turn("t1", "a"))
        made = msgspec.structs.replace(branch("s", 1), responses=responses)
        await lease.end_session(SessionEnd(session_id="s", owner=OWNER, trajectories=(made,)))
    (found,) = await run.trajectories(1)
    assert from_proto(found, Trajectory).responses == responses


async def test_a_list_looks_at_no_session_of_another_owner(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run = await cluster.run()
    monkeypatch.setattr("ebbtide.store.sessions._LOOKED_AT", 2)
    async with gateway(cluster) as lease:
        for number in range(6):
            await lease.open_session(f"other-{number}", "another")
        for number in range(3):
            await lease.open_session(f"mine-{number}", OWNER)
        found, _ = await cluster.coordinator.store.sessions.page(lease_ref(lease), OWNER, 0.0)
        assert [session.session_id for _, session in found] == ["mine-0", "mine-1"]
        assert [one.session_id for one in await lease.sessions(OWNER)] == ["mine-0", "mine-1", "mine-2"]
        assert len(await lease.sessions("another")) == 6
        for number in range(3):
            await lease.end_session(drop(f"mine-{number}", "x"))
    await pass_time(cluster, 601)
    await pass_time(cluster, 601)
    async with gateway(cluster, "g2") as lease:
        assert await lease.sessions(OWNER) == []
    assert await cluster.coordinator.link.call("KEYS", f"*owned:{OWNER}") == []
    assert await run.get()


async def test_branches_that_fill_several_messages_become_trajectories_together(cluster: Any) -> None:
    run = await cluster.run()
    long = [tokens(0, 150_000), tokens(5, 150_000), tokens(9, 10)]
    branches = [
        msgspec.structs.replace(branch(f"s.{number}", 1), tokens=one, loss_mask=bytes(len(one) // 12))
        for number, one in enumerate(long)
    ]
    async with gateway(cluster) as lease:
        await lease.open_session("s", OWNER)
        await lease.add_turn("s", OWNER, turn("t1", "a", "b", "c"))
        part = SessionEnd(session_id="s", owner=OWNER, trajectories=(branches[0],), more=True)
        assert (await lease.end_session(part)).state is OPEN  # by a gateway that dies then
        assert await run.count("trajectories") == 0
        whole = SessionEnd(session_id="s", owner=OWNER, trajectories=tuple(branches), record=b"reward")
        assert (await lease.end_session(whole)).record == b"reward"
        await lease.open_session("dropped", OWNER)
        await lease.add_turn("dropped", OWNER, turn("t1", "d"))
        other = SessionEnd(session_id="dropped", owner=OWNER, trajectories=(branch("dropped", 1),), more=True)
        await lease.end_session(other)
        assert (await lease.end_session(drop("dropped", "x"))).state is DROPPED
    found = await run.trajectories(3)
    assert [(one.episode_id, one.tokens) for one in found] == [(f"s.{n}", one) for n, one in enumerate(long)]
    await run.commit(*(one.cursor for one in found))
    await pass_time(cluster, 601)
    await pass_time(cluster, 601)
    counters = (await run.get()).counters
    assert [counters[name] for name in ("submitted", "trained", "trajectories", "bytes")] == [3, 3, 0, 0]


async def test_a_session_that_nobody_goes_on_with_is_dropped_after_its_time(cluster: Any) -> None:
    run, worker = await cluster.run(), await cluster.worker("w1")
    async with gateway(cluster) as lease:
        opened = await lease.open_session("s", OWNER)
        assert opened.ends_in_s == pytest.approx(3600, abs=10)
        await lease.add_turn("s", OWNER, turn("t1", "a"))
        await lease.submit_rollouts([asked("a")])
        await worker.has("a")
        await pass_time(cluster, 3000)
        assert (await lease.read_turns("s", OWNER)).session.idle_s == pytest.approx(3000, abs=10)
        await worker.add("a", 0, 4, STOP)  # a rollout that finishes is a sign of life
        await pass_time(cluster, 3000)
        assert (await lease.read_turns("s", OWNER)).session.state is OPEN
        await pass_time(cluster, 700)
        ended = (await lease.read_turns("s", OWNER)).session
        assert (ended.state, ended.drop_reason) == (DROPPED, "abandoned")
        assert ended.ends_in_s == pytest.approx(600, abs=10)
        with pytest.raises(NotReady, match="dropped abandoned"):
            await lease.add_turn("s", OWNER, turn("t2", "b"))
    counters = (await run.get()).counters
    assert [counters[name] for name in ("sessions_opened", "sessions_dropped", "sessions_abandoned")] == [1, 1, 1]
    assert "submitted" not in counters


async def test_a_session_stays_while_one_of_its_rollouts_waits_or_generates(cluster: Any) -> None:
    await cluster.run()
    worker = await cluster.worker("w1", slots=1)
    async with gateway(cluster) as lease:
        await lease.open_session("s", OWNER)
        await lease.add_turn("s", OWNER, turn("t1", "going", "waiting"))
        await lease.submit_rollouts([asked("going"), asked("waiting")])
        await worker.has("going")
        await pass_time(cluster, 3700)
        found = (await lease.read_turns("s", OWNER)).session
        assert found.state is OPEN
        assert found.idle_s == pytest.approx(0, abs=10)
        await worker.add("going", 0, 4, STOP)
        await worker.has("waiting")
        await pass_time(cluster, 3700)
        assert (await lease.read_turns("s", OWNER)).session.state is OPEN
        await worker.add("waiting", 0, 4, STOP)
        assert (await answer(lease, "waiting"))[0] == tokens(0, 4)
        await pass_time(cluster, 3700)
        assert (await lease.read_turns("s", OWNER)).session.drop_reason == "abandoned"


async def test_a_rollout_is_of_one_turn(cluster: Any) -> None:
    await cluster.run()
    async with gateway(cluster) as lease:
        for name in ("s", "other"):
            await lease.open_session(name, OWNER)
        await lease.add_turn("s", OWNER, turn("t1", "a"))
        for session_id in ("s", "other"):
            with pytest.raises(AlreadyExists, match="rollout a is of another turn"):
                await lease.add_turn(session_id, OWNER, turn("t2", "b", "a"))
        with pytest.raises(InvalidRequest, match=r"rollout_ids\[1\]: names b twice"):
            await lease.add_turn("s", OWNER, turn("t2", "b", "b"))


async def test_a_turn_takes_no_rollout_that_was_submitted_before(cluster: Any) -> None:
    run = await cluster.run()
    await run.submit("training")
    async with gateway(cluster) as lease:
        for name in ("s", "former"):
            await lease.open_session(name, OWNER)
        await lease.submit_rollouts([asked("of-another-owner")])
        await lease.add_turn("former", OWNER, turn("t1", "gone"))
        await lease.end_session(drop("former", "done"))
        for rollout_id in ("training", "of-another-owner", "gone"):
            with pytest.raises(AlreadyExists, match=f"rollout {rollout_id} was submitted before its turn"):
                await lease.add_turn("s", OWNER, turn("t1", "new", rollout_id))
        assert (await lease.add_turn("s", OWNER, turn("t1", "new"))).number == 1


async def test_a_turn_cannot_bar_a_training_rollout_that_is_submitted_later(cluster: Any) -> None:
    run = await cluster.run()
    async with gateway(cluster) as lease:
        for name in ("s", "open"):
            await lease.open_session(name, OWNER)
        await lease.add_turn("s", OWNER, turn("t1", "e1.0"))
        await lease.end_session(drop("s", "done"))
        await lease.add_turn("open", OWNER, turn("t1", "e2.0"))
        assert await run.submit("e1.0", "e2.0") == [1, 1]
        await lease.end_session(drop("open", "done"))
        await cluster.coordinator.retention.round()
        assert await lease.submit_rollouts([asked("q-1")]) == [ACCEPTED]
    assert await run.count("queued") == 3


async def test_trajectories_that_come_ahead_are_within_the_quota_and_again_cost_nothing(cluster: Any) -> None:
    run = await cluster.run(quota_bytes=1 << 20)
    long = [
        msgspec.structs.replace(branch(f"s.{n}", 1), tokens=tokens(0, 40_000), loss_mask=bytes(40_000)) for n in (0, 1)
    ]
    async with gateway(cluster) as lease:
        await lease.open_session("s", OWNER)
        await lease.add_turn("s", OWNER, turn("t1", "a", "b"))
        ahead = [SessionEnd(session_id="s", owner=OWNER, trajectories=(one,), more=True) for one in long]
        await lease.end_session(ahead[0])
        assert (await lease.end_session(ahead[0])).state is OPEN
        with pytest.raises(NoCapacity, match="of its quota_bytes"):
            await lease.end_session(ahead[1])
        assert (await lease.end_session(drop("s", "too_large"))).state is DROPPED
    assert await run.count("bytes") < 10_000


async def test_sessions_take_of_the_runs_quota_and_give_it_back(cluster: Any) -> None:
    run = await cluster.run(quota_bytes=1 << 20)
    async with gateway(cluster) as lease:
        await lease.open_session("s", OWNER)
        await lease.add_turn("s", OWNER, turn("t1", "a", record=bytes(700_000)))
        with pytest.raises(NoCapacity, match="of its quota_bytes"):
            await lease.add_turn("s", OWNER, turn("t2", "b", record=bytes(200_000)))
        with pytest.raises(NoCapacity, match="quota_bytes"):
            await run.submit("t", prompt_ids=bytes(4) * 100_000)
        assert (await lease.read_turns("s", OWNER)).session.turns == 1
        await lease.end_session(drop("s", "too_large"))
        assert await run.submit("t", prompt_ids=bytes(4) * 100_000) == [1]


async def test_turns_are_read_in_pages_of_some_megabytes(cluster: Any) -> None:
    await cluster.run()
    async with gateway(cluster) as lease:
        await lease.open_session("s", OWNER)
        sizes = [MAX_TURN_RECORD, 700_000, 700_000, 700_000, 10, MAX_TURN_RECORD]
        for number, size in enumerate(sizes):
            await lease.add_turn("s", OWNER, turn(f"t{number}", record=bytes(size)))
        pages, after, more = [], 0, True
        while more:
            page = await lease.read_turns("s", OWNER, after)
            pages.append([len(one.record) for one in page.turns])
            after, more = page.turns[-1].number, page.more
        assert pages == [[MAX_TURN_RECORD], [700_000, 700_000], [700_000, 10], [MAX_TURN_RECORD]]
        with pytest.raises(InvalidRequest, match="record"):
            await lease.add_turn("s", OWNER, turn("large", record=bytes(MAX_TURN_RECORD + 1)))


@pytest.mark.parametrize(
    ("how", "field"),
    [
        (SessionEnd(session_id="s", owner=OWNER), "drop_reason"),
        (SessionEnd(session_id="s", owner=OWNER, drop_reason="x", trajectories=(branch("s", 1),)), "drop_reason"),
        (SessionEnd(session_id="s", owner=OWNER, trajectories=(branch("other", 1),)), r"trajectories\[0\].episode_id"),
        (completed("s", 1, 0), r"trajectories\[1\].rollouts"),
        (answered("s", (0, 1), (0, 2)), r"trajectories\[0\].responses\[1\]"),
        (answered("s", (1, 3)), r"trajectories\[0\].responses\[0\]"),
        (drop("s", "no such id!"), "drop_reason"),
        (drop("s", "x", record=bytes(70_000)), "record"),
    ],
)
async def test_an_end_that_cannot_be_is_refused_by_field(cluster: Any, how: SessionEnd, field: str) -> None:
    await cluster.run()
    async with gateway(cluster) as lease:
        await lease.open_session("s", OWNER)
        with pytest.raises(InvalidRequest, match=field):
            await lease.end_session(how)
        assert (await lease.read_turns("s", OWNER)).session.state is OPEN


async def test_an_end_may_leave_a_last_record(cluster: Any) -> None:
    await cluster.run()
    async with gateway(cluster) as lease:
        await lease.open_session("s", OWNER, record=b"so far")
        await lease.end_session(drop("s", "x", record=b"its reward"))
        assert (await lease.read_turns("s", OWNER)).session.record == b"its reward"


async def test_open_sessions_and_requests_are_counted_for_people_on_call(cluster: Any) -> None:
    await cluster.run()
    before = metrics.requests._value.get()
    async with gateway(cluster) as lease:
        for session_id in ("s1", "s2", "s3"):
            await lease.open_session(session_id, OWNER)
        await lease.end_session(drop("s2", "done"))
        assert await lease.submit_rollouts([asked("q-1"), asked("q-2")]) == [ACCEPTED, ACCEPTED]
        await lease.submit_rollouts([asked("q-1")])
        await metrics.measure(cluster.coordinator.state, cluster.coordinator.store)
    assert metrics.sessions._value.get() == 2
    assert metrics.requests._value.get() - before == 2
