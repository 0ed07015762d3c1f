"""Whole runs through all services: what is submitted is accounted for, whatever dies on the way."""

import asyncio
import re
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ebbtide.cli.views.samples import SampleFilter, fetch
from ebbtide.client import Client
from ebbtide.types.run import Run, RunEvent, RunSpec, RunStatus, TailSpec
from tests.support.waiting import wait_until

MakeSpec = Callable[..., RunSpec]


async def ended(client: Client, run_id: str) -> tuple[Run, list[RunEvent]]:
    """The run once it has ended, and all its events."""
    async with asyncio.timeout(90):
        events = [event async for event in client.watch(run_id)]
    return await client.run(run_id), events


def check_books(run: Run, events: list[RunEvent]) -> None:
    """A run that finished: every rollout has one end, every evaluation was told once, each step is in the record."""
    assert run.status is RunStatus.FINISHED, run.message
    assert run.counters["submitted"] == run.counters.get("trained", 0) + run.counters.get("dropped", 0)
    assert run.counters.get("dropped", 0) == sum(run.dropped.values())
    spec = run.spec
    told = [event.values["step"] for event in events if event.kind == "evaluation"]
    assert sorted(told) == sorted(told_steps(spec))
    assert {event.values["step"] for event in events if event.kind == "step"} == set(range(1, spec.trainer.steps + 1))
    published = [event.values for event in events if event.kind == "step" and "publish_bytes" in event.values]
    assert published
    for values in published:
        assert 0 <= values["publish_bytes"] <= values["publish_dense_bytes"]
        assert 0 <= values["publish_density"] <= 1
        assert 0 < values["publish_pause_s"] < values["publish_seconds"]


def told_steps(spec: RunSpec) -> list[int]:
    return [0, *range(spec.evaluation.every, spec.trainer.steps, spec.evaluation.every), spec.trainer.steps]


def final_weights(run: Run) -> dict[str, torch.Tensor]:
    folder = Path(run.spec.output) / run.run_id / "checkpoints" / f"step-{run.spec.trainer.steps:06d}"
    return load_file(folder / "model.safetensors")


async def trained(client: Client, run_id: str, step: int) -> bool:
    newest = (await client.run(run_id)).newest
    return newest is not None and newest.step >= step


async def test_a_run_killed_anywhere_ends_like_an_undisturbed_one(
    cluster: Any, client: Client, make_spec: MakeSpec
) -> None:
    """Scripted tokens depend on the prompt alone, so with the same seed the weights must agree to the last bit. A
    group's samples are equal for the same reason: what moves the weights is their decay, and the KL term."""
    make_spec = partial(make_spec, trainer={"kl_coefficient": 0.5, "weight_decay": 0.5})
    calm, events = await ended(client, (await client.submit(make_spec(), "calm")).run_id)
    check_books(calm, events)
    assert calm.counters["trained"] == calm.counters["submitted"] == 6 * 4 * 4
    moves = [event.values["grad_norm"] for event in events if event.kind == "step"]
    assert all(norm > 0 for norm in moves[1:])

    for victim in ("trainer", "driver", "coordinator"):
        await client.submit(make_spec(), victim)
        for step in (1, 4):
            await wait_until(partial(trained, client, victim, step), timeout=60)
            await cluster.restart(victim, signal.SIGKILL)
        run, events = await ended(client, victim)
        check_books(run, events)
        assert run.counters["trained"] == run.counters["submitted"] == 6 * 4 * 4
        expected, found = final_weights(calm), final_weights(run)
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items()), victim


async def test_all_samples_are_shown_until_a_checkpoint_holds_them_and_some_of_them_afterwards(
    cluster: Any, client: Client, make_spec: MakeSpec
) -> None:
    spec = make_spec(trainer={"checkpoint_every": 100})
    await client.submit(spec, "sampled")
    await wait_until(partial(trained, client, "sampled", 2), timeout=60)
    trainer = cluster.programs["trainer"].process
    trainer.send_signal(signal.SIGSTOP)
    try:
        first = await fetch(client, "sampled", SampleFilter(step=1, most=100))
        worst, *_ = await fetch(client, "sampled", SampleFilter(worst=True, most=1))
    finally:
        trainer.send_signal(signal.SIGCONT)
    assert len(first) == 4 * 4
    assert {one.step for one in first} == {1}
    for one in first:
        assert one.prompt
        assert one.response[0].sampled
        assert one.tokens == sum(part.last - part.first for part in one.workers) > 0
        assert {part.worker for part in one.workers} == {(await client.workers())[0].worker_id}
    assert worst.reward <= min(one.reward for one in first)
    await ended(client, "sampled")
    kept = await fetch(client, "sampled", SampleFilter(step=1, most=100))
    assert {one.episode for one in kept} < {one.episode for one in first}, "those that the trainer's trackers wrote"
    assert kept[0].reward == min(one.reward for one in first)


async def test_a_trainer_killed_within_a_streamed_step_trains_its_groups_once(
    cluster: Any, client: Client, make_spec: MakeSpec
) -> None:
    """One group of the third step and of the fifth takes a second longer than the others."""
    params = {"turns": 2, "vary": True, "slow": [9, 17]}
    spec = make_spec(environment={"params": params}, trainer={"streaming": True})
    before = cluster.streamed_groups()
    await client.submit(spec, "streamed")
    await wait_until(lambda: cluster.streamed_groups() - before > 8, timeout=60, what="a group of the third step")
    assert cluster.streamed_groups() - before < 12
    assert not await trained(client, "streamed", 3)
    await cluster.restart("trainer", signal.SIGKILL)
    run, events = await ended(client, "streamed")
    check_books(run, events)
    assert run.counters["trained"] == run.counters["submitted"] == 2 * 6 * 4 * 4
    resumed = [event.values["step"] for event in events if event.kind == "resumed"]
    assert resumed == [2]
    steps = [event.values for event in events if event.kind == "step"]
    assert all(values["grad_norm"] > 0 for values in steps)
    assert 0 < steps[4]["overlapped_s"] < steps[4]["seconds_train"]
    assert cluster.streamed_groups() == 4 * 4, "its gradients died with the trainer, so all of the third step's again"


async def test_a_driver_with_broken_and_stalling_environments_still_ends_its_run(
    cluster: Any, client: Client, make_spec: MakeSpec
) -> None:
    spec = make_spec(
        environment={"params": {"turns": 2, "crash": [1], "stall": [6], "segfault": [9]}},
        batch={"episode_timeout_s": 0.5, "incomplete_group": "replace"},
        trainer={"steps": 3},
    )
    run, events = await ended(client, (await client.submit(spec)).run_id)
    check_books(run, events)
    # Each sample of the three bad problems was tried three times, for one turn.
    assert run.dropped == {"environment_failure": 24, "episode_timeout": 12}
    assert run.counters["trained"] == 2 * 4 * (4 * 3 - 3)
    dropped = [event for event in events if event.kind == "group_dropped"]
    assert {event.key for event in dropped} == {"s0.g1", "s1.g2", "s2.g1"}
    assert "problem 1 is broken" in dropped[0].message


async def test_generation_runs_ahead_within_the_staleness_allowed(
    cluster: Any, client: Client, make_spec: MakeSpec
) -> None:
    spec = make_spec(batch={"max_staleness": 2})
    run, events = await ended(client, (await client.submit(spec)).run_id)
    check_books(run, events)
    assert not run.dropped
    stale = [event.values["staleness_max"] for event in events if event.kind == "step"]
    assert max(stale) <= 2


async def test_rounds_train_each_group_once_though_driver_and_coordinator_are_killed_in_the_middle(
    cluster: Any, client: Client, make_spec: MakeSpec
) -> None:
    """Groups 1, 9 and 17 take a second longer than the others, so they go on behind their steps."""
    spec = make_spec(
        environment={"params": {"turns": 2, "slow": [1, 9, 17]}},
        batch={"max_staleness": 2},
        tail=TailSpec(rounds="whole_groups", rounds_excess=1.5),
    )
    await client.submit(spec, "rounds")
    for step, victim in ((1, "driver"), (2, "coordinator"), (4, "driver")):
        await wait_until(partial(trained, client, "rounds", step), timeout=60)
        await cluster.restart(victim, signal.SIGKILL)
    run, events = await ended(client, "rounds")
    check_books(run, events)
    assert run.counters["trained"] == run.counters["submitted"] == 2 * 6 * 4 * 4
    assert not run.dropped
    taken: dict[int, float] = {}
    for event in events:
        if event.kind == "round_taken":
            taken |= dict.fromkeys(map(int, event.labels["groups"].split()), event.values["step"])
    assert sorted(taken) == list(range(6 * 4))
    assert taken[1] > 0, "the slow group was trained behind its step"
    assert all(list(taken.values()).count(step) == 4 for step in range(6))
    assert max(event.values["staleness_max"] for event in events if event.kind == "step") <= 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"environment": {"name": "reasoning_gym", "params": {"dataset": "nope"}}}, "environment.params.dataset"),
        ({"environment": {"name": "nowhere:at_all"}}, "environment.name: cannot import"),
        ({"environment": {"name": "subprocess:Popen"}}, r"environments\.allowed"),
        ({"model": "no-such-directory"}, "model"),
        ({"environment": {"params": {"crash": [0, 1, 2, 3]}}}, "problem . is broken"),
    ],
)
async def test_a_bad_run_fails_at_once_with_a_clear_message_and_the_next_one_is_taken(
    changes: dict[str, Any], message: str, cluster: Any, client: Client, make_spec: MakeSpec
) -> None:
    run, _ = await ended(client, (await client.submit(make_spec(**changes))).run_id)
    assert run.status is RunStatus.FAILED
    assert re.search(message, run.message), run.message
    run, events = await ended(client, (await client.submit(make_spec(trainer={"steps": 3}))).run_id)
    check_books(run, events)


async def test_a_run_that_brings_its_own_trainer_is_left_alone(
    cluster: Any, client: Client, make_spec: MakeSpec
) -> None:
    await client.submit(make_spec(trainer={"name": "external"}), "external")
    run, events = await ended(client, (await client.submit(make_spec(trainer={"steps": 1}))).run_id)
    check_books(run, events)
    async with client.claim("external", holder="outside") as lease:
        assert lease.run.holders == {"trainer": "outside"}
        await lease.finish()


async def test_a_cancelled_run_frees_driver_and_trainer_for_the_next(
    cluster: Any, client: Client, make_spec: MakeSpec
) -> None:
    await client.submit(make_spec(trainer={"steps": 1000}), "long")
    await wait_until(partial(trained, client, "long", 2), timeout=60)
    assert (await client.cancel("long")).status is RunStatus.CANCELLED
    run, events = await ended(client, (await client.submit(make_spec(trainer={"steps": 3}))).run_id)
    check_books(run, events)


async def test_sigterm_ends_driver_and_trainer_cleanly_and_the_run_goes_on_with_the_next_ones(
    cluster: Any, client: Client, make_spec: MakeSpec
) -> None:
    await client.submit(make_spec(), "handed-over")
    for name in ("driver", "trainer"):
        await wait_until(partial(trained, client, "handed-over", 1), timeout=60)
        assert await cluster.restart(name, signal.SIGTERM) == 0
    run, events = await ended(client, "handed-over")
    check_books(run, events)
    assert run.counters["trained"] == 6 * 4 * 4
