"""A live coordinator forecasts lengths: workers hear of them, the queue follows them, and people see them."""

from typing import Any

from ebbtide.coordinator.dispatch import dispatch_round
from ebbtide.types.run import BatchSpec, TailSpec
from ebbtide.v1 import types_pb2
from tests.support.waiting import wait_until

STOP = types_pb2.FINISH_REASON_STOP
BY_LENGTHS = {"tail": TailSpec(order="lengths"), "batch": BatchSpec(groups_per_step=2, group_size=4)}


async def step(run: Any, worker: Any, name: str, lengths: dict[str, int]) -> None:
    """A whole step: of each group four samples of one length."""
    names = {f"{name}.{group}.{number}": tokens for group, tokens in lengths.items() for number in range(4)}
    await run.send(*(run.request(one, group_id=one.rpartition(".")[0]) for one in names))
    open_ = set(names)
    while open_:  # in whatever order they are assigned
        await wait_until(lambda: open_ & set(worker.assigned), what="one of the step's rollouts is assigned")
        for one in open_ & set(worker.assigned):
            assert (await worker.add(one, 0, names[one], STOP)).finished
            open_.remove(one)


async def test_the_long_groups_samples_start_before_those_of_a_group_that_was_submitted_earlier(cluster: Any) -> None:
    run, worker = await cluster.run(**BY_LENGTHS), await cluster.worker("w1", slots=2)
    for number in range(3):
        await step(run, worker, f"taught{number}", {"a": 4, "b": 40, "c": 6, "d": 30})
    names = [f"{group}.{number}" for group in ("short", "long") for number in range(4)]
    await run.send(*(run.request(one, group_id=one.partition(".")[0]) for one in names))
    await worker.has("short.0", "long.0")  # a probe of each
    assert (await worker.add("short.0", 0, 4, STOP)).finished
    assert (await worker.add("long.0", 0, 40, STOP)).finished
    queue = cluster.coordinator.state.runs["r"].queue

    def long_ones_first() -> bool:
        waiting = [one.rollout_id.partition(".")[0] for one in queue]
        return bool(waiting) and waiting == sorted(waiting)  # "long" goes before "short"

    await wait_until(long_ones_first, what="what is left goes by the lengths of the probes")
    left = [one.rollout_id for one in queue]
    for one in [name for name in names if name in worker.assigned and not name.endswith(".0")]:
        assert (await worker.add(one, 0, 4, STOP)).finished
    await worker.has(*left[:2])
    assert all(one not in worker.assigned for one in left[2:])


async def test_a_run_that_orders_nothing_starts_groups_as_they_were_submitted(cluster: Any) -> None:
    run, worker = await cluster.run(), await cluster.worker("w1", slots=2)
    names = [f"{group}.{number}" for group in ("x", "y") for number in range(2)]
    await run.send(*(run.request(one, group_id=one.partition(".")[0]) for one in names))
    await worker.has("x.0", "x.1")
    assert set(worker.assigned) == {"x.0", "x.1"}
    assert [one.rollout_id for one in cluster.coordinator.state.runs["r"].queue] == ["y.0", "y.1"]


async def test_workers_are_told_what_is_to_come_at_the_assignment_and_when_it_has_changed(
    cluster: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(dispatch_round, "_TELL_EVERY_S", 0.0)
    run = await cluster.run(**BY_LENGTHS)
    worker = await cluster.worker("w1", slots=4, capabilities=["forecasts"])
    for number in range(3):
        await step(run, worker, f"taught{number}", {"a": 4, "b": 40, "c": 6, "d": 30})
    first = worker.assigned["taught0.a.0"]
    assert (first.expected_tokens, first.longest_tokens) == (0, 0)  # nothing was known
    await run.submit("p.0", "p.1", group_id="p")
    await worker.has("p.0", "p.1")
    told = worker.assigned["p.1"]
    assert 0 < told.expected_tokens <= 64
    assert told.expected_tokens <= told.longest_tokens <= 64
    assert (await worker.add("p.0", 0, 5, STOP)).finished
    attempt = told.attempt.attempt_id
    await wait_until(lambda: attempt in worker.forecasts, what="it is told that its sibling was short")
    assert worker.forecasts[attempt].longest_tokens < told.longest_tokens


async def test_a_run_shows_how_often_forecasts_held_and_what_may_end_last(cluster: Any) -> None:
    run, worker = await cluster.run(**BY_LENGTHS), await cluster.worker("w1", slots=4, capabilities=["forecasts"])
    for number in range(3):
        await step(run, worker, f"s{number}", {"a": 4, "b": 40, "c": 6, "d": 30})
    await run.submit("open", group_id="open")
    await worker.has("open")

    async def shown() -> bool:
        outlook = (await run.get()).outlook
        return outlook.forecast > 0 and [one.rollout_id for one in outlook.longest] == ["open"]

    await wait_until(shown, what="the run shows what may end last")
    outlook = (await run.get()).outlook
    assert 0 <= outlook.covered <= outlook.forecast <= 48
    assert outlook.longest[0].expected_tokens > 0


async def test_what_a_restarted_coordinator_reads_back_keeps_the_order_of_its_steps(cluster: Any) -> None:
    run = await cluster.run(**BY_LENGTHS)
    for step_number, names in ((5, "cd"), (4, "ab")):  # "a" and "b" are an earlier step's, and came later
        await run.send(*(run.request(one, group_id=one) for one in names), step=step_number)
    await cluster.restart()
    await run.send(run.request("e", group_id="e"), step=4)
    queue = cluster.coordinator.state.runs["r"].queue
    await wait_until(lambda: len(queue) == 5, what="all are queued again")
    assert [(one.step, one.rollout_id) for one in queue] == [(4, "a"), (4, "b"), (4, "e"), (5, "c"), (5, "d")]
