"""Workers that share a group get each other's stored tokens with their answers: in order, once, and nothing else."""

import gc
import weakref
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from ebbtide.errors import InvalidRequest
from ebbtide.rollout_worker.streams.sibling_client import SiblingClient
from ebbtide.types.fleet import AttemptRef
from ebbtide.types.rollout import RolloutKind
from ebbtide.types.tail_spec import TailSpec
from ebbtide.v1 import fleet_pb2, runs_pb2, types_pb2
from ebbtide.wire.record_conversion import from_proto
from ebbtide.wire.sibling_columns import MOST_HELD
from tests.fakes.scripted_worker import ScriptedWorker
from tests.fakes.sibling_sink import RecordedSink
from tests.support.waiting import wait_until

STOP = types_pb2.FINISH_REASON_STOP
GROUPED = TailSpec(speculation="grouped")


class Pair:
    """Two workers that draft, and what each was fed. Rollouts are submitted one by one, for one worker each."""

    def __init__(self, cluster: Any, run: Any) -> None:
        self.cluster, self.run = cluster, run
        self.sinks = {name: RecordedSink() for name in ("w1", "w2")}
        self.clients = {name: SiblingClient(sink) for name, sink in self.sinks.items()}
        self.workers: dict[str, ScriptedWorker] = {}

    async def attach(self, name: str, *, slots: int = 2, **more: Any) -> ScriptedWorker:
        worker: ScriptedWorker = await self.cluster.worker(
            name, slots=slots, siblings=self.clients[name], capabilities=["resume", "siblings"], **more
        )
        self.workers[name] = worker
        return worker

    async def again(self, name: str, *rollout_ids: str) -> ScriptedWorker:
        """Attach as the same process, after its streams broke."""
        before = self.workers[name]
        held = [fleet_pb2.HeldAttempt(attempt=before.assigned[one].attempt) for one in rollout_ids]
        version = types_pb2.PolicyVersion(policy="policy", version=1, root=bytes([1]) * 32)
        back = await self.attach(name, held=held, installed=[version], run_id="r")
        back.assigned = {one: before.assigned[one] for one in rollout_ids}
        assert [from_proto(one, AttemptRef).rollout_id for one in back.attached.adopted] == list(rollout_ids)
        return back

    async def place(self, rollout_id: str, name: str, **more: Any) -> None:
        """Submit a rollout of which the other worker can take none: all its slots are used."""
        await self.run.submit(rollout_id, **more)
        await self.workers[name].has(rollout_id)

    async def fed(self, name: str, **lengths: int) -> None:
        """Wait until a worker, which asks again and again, has so many tokens of these, and of nothing else."""

        async def asked() -> bool:
            await self.workers[name].send()
            found = self.sinks[name].ids.get("g", {})
            return {one: len(ids) for one, ids in found.items()} == lengths

        await wait_until(asked, what=f"{lengths} at {name}; it has {self.sinks[name].ids}")
        for one, length in lengths.items():
            start = self.sinks[name].starts[one]
            assert self.sinks[name].ids["g"][one] == list(range(start, start + length))


@pytest.fixture
async def pair(cluster: Any) -> Pair:
    """`a` at `w1` and `b` at `w2`, of the same group."""
    made = Pair(cluster, await cluster.run(tail=GROUPED))
    await made.attach("w1", slots=1)
    await made.place("a", "w1")
    await made.attach("w2")
    await made.place("b", "w2")
    return made


async def test_each_worker_gets_exactly_the_others_tokens_from_the_start_in_order_and_once(pair: Pair) -> None:
    one, two = pair.workers["w1"], pair.workers["w2"]
    assert [worker.assigned[name].group_id for worker, name in ((one, "a"), (two, "b"))] == ["g", "g"]
    for at in range(0, 30, 5):
        await one.add("a", at, 5)
        await two.add("b", at, 5)
    await pair.fed("w1", b=30)
    await pair.fed("w2", a=30)
    await one.add("a", 30, 2)
    await pair.fed("w2", a=32)
    assert pair.sinks["w2"].versions == {1}


async def test_a_worker_that_joins_a_group_gets_what_is_finished_and_what_runs_of_it(pair: Pair) -> None:
    one, two = pair.workers["w1"], pair.workers["w2"]
    await one.add("a", 0, 40, STOP)
    await two.add("b", 0, 20)
    await pair.fed("w2", a=40)
    await pair.place("c", "w1")
    await one.add("c", 0, 1)
    await pair.fed("w1", b=20, a=40)
    await pair.fed("w2", a=40, c=1)


async def test_a_groups_end_is_told_and_nothing_of_it_comes_afterwards(pair: Pair) -> None:
    one, two = pair.workers["w1"], pair.workers["w2"]
    await one.add("a", 0, 5)
    await two.add("b", 0, 5)
    await pair.fed("w1", b=5)
    await one.add("a", 5, 1, STOP)
    assert pair.sinks["w1"].ended == ["g"]
    await two.add("b", 5, 5)
    await one.send()
    assert pair.sinks["w1"].ids == {}


async def test_other_groups_other_runs_requests_and_workers_that_do_not_ask_get_nothing(cluster: Any) -> None:
    pair = Pair(cluster, await cluster.run(tail=GROUPED))
    one = await pair.attach("w1", slots=2)
    await pair.place("a", "w1")
    await pair.place("e", "w1", group_id="h", kind=RolloutKind.EVAL)
    silent = await cluster.worker("w3", slots=2)
    await pair.run.submit("b", "f", group_id="elsewhere")
    await silent.has("b", "f")
    for worker, name in ((one, "a"), (one, "e"), (silent, "b"), (silent, "f")):
        await worker.add(name, 0, 5)
    response = await silent.exchange(silent.message(silent.delta("b", 5, 5)))
    assert not response.HasField("siblings")
    await one.send()
    assert pair.sinks["w1"].ids == {}


async def test_a_run_without_speculation_feeds_nobody_and_names_no_group(cluster: Any) -> None:
    pair = Pair(cluster, await cluster.run())
    one, two = await pair.attach("w1", slots=1), await pair.attach("w2", slots=1)
    await pair.run.submit("a", "b")
    await wait_until(lambda: one.assigned and two.assigned)
    for worker in (one, two):
        (name,) = worker.assigned
        assert worker.assigned[name].group_id == ""
        await worker.add(name, 0, 5)
    await one.send()
    assert pair.sinks["w1"].ids == pair.sinks["w2"].ids == {}


async def test_a_broken_stream_goes_on_behind_what_the_worker_has(pair: Pair) -> None:
    one, two = pair.workers["w1"], pair.workers["w2"]
    await one.add("a", 0, 10)
    await two.add("b", 0, 10)
    await pair.fed("w1", b=10)
    await two.add("b", 10, 10)
    await one.open_append()
    await two.add("b", 20, 10)
    await one.add("a", 10, 1)
    await pair.fed("w1", b=30)


async def test_after_a_takeover_workers_get_the_rest_and_nothing_again(pair: Pair) -> None:
    one, two = pair.workers["w1"], pair.workers["w2"]
    await one.add("a", 0, 10)
    await two.add("b", 0, 10)
    await pair.fed("w1", b=10)
    await pair.fed("w2", a=10)
    await two.add("b", 10, 10)
    await pair.cluster.restart()
    one, two = await pair.again("w1", "a"), await pair.again("w2", "b")
    await two.add("b", 20, 10)
    await one.add("a", 10, 1)
    await pair.fed("w1", b=30)
    await pair.fed("w2", a=11)


async def test_when_a_worker_is_killed_its_rollout_goes_on_and_the_next_one_gets_all_from_the_start(pair: Pair) -> None:
    one, two = pair.workers["w1"], pair.workers["w2"]
    await one.add("a", 0, 10)
    await two.add("b", 0, 10)
    await pair.fed("w2", a=10)
    await one.break_streams()
    await two.has("a")
    await two.add("a", 10, 5)
    pair.sinks["w1"] = RecordedSink()
    pair.clients["w1"] = SiblingClient(pair.sinks["w1"])
    one = await pair.attach("w1")
    await pair.place("c", "w1")
    await one.add("c", 0, 1)
    await pair.fed("w1", a=15, b=10)
    await pair.fed("w2", a=10, c=1)


async def test_a_worker_that_says_to_hold_more_than_it_may_is_refused(pair: Pair) -> None:
    many = fleet_pb2.HeldSiblings(rollout_ids=["x"] * MOST_HELD, ends=[1] * MOST_HELD)
    worker = pair.workers["w1"]
    worker.siblings = SimpleNamespace(open=lambda: [many])  # type: ignore[assignment] # an imitation
    with pytest.raises(InvalidRequest, match="at most"):
        await worker.open_append()


async def test_through_broken_streams_and_takeovers_at_any_moment_no_token_is_missed_or_doubled(pair: Pair) -> None:
    draw, made = Random(5), {"a": 0, "b": 0}
    makes = {"a": "w1", "b": "w2"}
    for step in range(60):
        rollout = draw.choice("ab")
        worker = pair.workers[makes[rollout]]
        if step in {20, 41}:
            await pair.cluster.restart()
            for name, by in makes.items():
                await pair.again(by, name)
        elif draw.random() < 0.2:
            await worker.open_append()
        elif made[rollout] < 60:
            count = draw.randint(1, 3)
            await worker.add(rollout, made[rollout], count)
            made[rollout] += count
    await pair.fed("w1", b=made["b"])
    await pair.fed("w2", a=made["a"])
    assert min(made.values()) > 20


async def test_of_a_run_that_is_over_nothing_stays_though_its_workers_go_on(pair: Pair) -> None:
    await pair.workers["w1"].add("a", 0, 5, STOP)
    await pair.fed("w2", a=5)
    await pair.workers["w2"].add("b", 0, 5, STOP)
    state = pair.cluster.coordinator.state
    run = weakref.ref(state.runs["r"])
    await pair.cluster.call(pair.cluster.runs.CancelRun, runs_pb2.CancelRunRequest(run_id="r"))
    await wait_until(lambda: not state.runs and not state.ended, what="the run is over")

    def gone() -> bool:
        gc.collect()
        return run() is None

    await wait_until(gone, what="nothing refers to the run")
    assert {session.worker_id for session in state.sessions.values()} == {"w1", "w2"}
