"""Engines with contexts of different lengths: a response ends where the run's context ends, whoever generates it."""

from collections.abc import Callable
from contextlib import aclosing
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from ebbtide.client import Client
from ebbtide.ledger import read_ledger
from ebbtide.types.fleet import EndCause
from ebbtide.types.rollout import FinishReason, RolloutRequest
from ebbtide.types.run import RunEvent, Sampling
from ebbtide.types.tokens import pack_ids, unpack_tokens
from tests.chaos.cluster import Cluster
from tests.chaos.load import RUN, SPEC, publish
from tests.fakes.scripted_engine import follow
from tests.fakes.scripted_fleet import PROMPT
from tests.fakes.scripted_settings import ScriptedSettings
from tests.support.waiting import wait_until

House = Any  # the fixture's class lives in conftest.py
#: Prompt plus response, in tokens, of the worker with less, and of the other one.
SHORT, LONG = 48, 96
SCRIPT = ScriptedSettings(vocab_size=100, mean_length=64)


def requests(count: int) -> list[RolloutRequest]:
    """Rollouts whose responses end by themselves, within either context or beyond both."""
    return [
        RolloutRequest(
            rollout_id=f"x{number}",
            group_id="g",
            episode_id=f"e{number}",
            prompt_ids=pack_ids([number + 2, 7, 8, 9]),
            sampling=Sampling(max_tokens=1000),
        )
        for number in range(count)
    ]


def undisturbed(request: RolloutRequest, number: int) -> tuple[list[int], FinishReason]:
    """What one engine with the long context makes of it."""
    prompt = [number + 2, 7, 8, 9]
    ids = [token for token, _ in follow(SCRIPT, prompt, LONG - len(prompt))]
    return (ids[: ids.index(1) + 1], FinishReason.STOP) if 1 in ids else (ids, FinishReason.LENGTH)


async def test_a_worker_releases_what_fills_its_context_and_goes_on_with_what_it_is_given(
    house: House, expected: Callable[[int], list[int]]
) -> None:
    await house.worker(script={"max_model_len": SHORT})
    house.coordinator.assign("r1", Sampling(max_tokens=1000), max_model_len=LONG)
    room = SHORT - len(PROMPT)
    await wait_until(lambda: "r1" in house.coordinator.released())
    assert house.coordinator.causes() == {"r1": EndCause.SHORT_CONTEXT}
    assert house.coordinator.ids("r1") == expected(room)
    house.coordinator.assign("r1", Sampling(max_tokens=1000), attempt="a2", max_model_len=LONG)  # as if it had more
    await house.coordinator.hear("released", 2)
    assert house.coordinator.ids("r1") == expected(room)
    assert sum(record.generated for record in read_ledger(house.counter_file)) == room
    assert house.coordinator.finished == {}


async def test_a_worker_releases_what_is_longer_than_the_context_that_it_is_told(house: House) -> None:
    await house.worker(script={"max_model_len": LONG})
    house.coordinator.assign("r1", Sampling(max_tokens=1000), max_model_len=len(PROMPT) - 1)
    await wait_until(lambda: "r1" in house.coordinator.released())
    assert house.coordinator.causes() == {"r1": EndCause.SHORT_CONTEXT}
    assert house.coordinator.ids("r1") == []
    assert house.coordinator.finished == {}


async def test_a_worker_ends_by_its_own_context_what_a_former_coordinator_gives_it(house: House) -> None:
    await house.worker(script={"max_model_len": SHORT})
    house.coordinator.assign("r1", Sampling(max_tokens=1000))
    await wait_until(lambda: house.coordinator.finished == {"r1": FinishReason.LENGTH})
    assert house.coordinator.length("r1") == SHORT - len(PROMPT)


async def boot(cluster: Cluster, **workers: int) -> Client:
    """A cluster whose workers, by name, have contexts of so many tokens."""
    client = await cluster.boot(workers=0)
    for name, context in workers.items():
        await cluster.worker(name, slots=2, script=replace(SCRIPT, step_s=0.002, max_model_len=context))
    return client


@pytest.mark.timeout(40)
async def test_a_fleet_of_two_contexts_makes_what_the_longer_alone_would(cluster: Cluster) -> None:
    client = await boot(cluster, w1=SHORT, w2=LONG)
    await client.submit(SPEC, RUN)
    wanted = requests(24)
    async with client.claim(RUN, holder="test") as lease:
        await publish(lease, step=0)
        await lease.submit_rollouts(wanted)
        came = {}
        async for one in lease.finished():
            came[one.rollout_id] = (unpack_tokens(one.tokens)["id"].tolist(), one.reason)
            if len(came) == len(wanted):
                break
    assert came == {one.rollout_id: undisturbed(one, number) for number, one in enumerate(wanted)}
    assert {reason for _, reason in came.values()} == {FinishReason.STOP, FinishReason.LENGTH}
    spans = [span async for span in client.timeline(RUN)]
    assert EndCause.SHORT_CONTEXT in {span.cause for span in spans}  # the shorter one took part


async def warning(client: Client) -> RunEvent:
    """The first one that tells of contexts."""
    async with aclosing(client.watch(RUN)) as events:
        return await anext(event async for event in events if "longer context" in event.message)


@pytest.mark.timeout(40)
async def test_a_run_whose_context_no_worker_has_waits_for_one_and_says_so(cluster: Cluster) -> None:
    client = await boot(cluster, w1=SHORT)
    await client.submit({**SPEC, "max_model_len": LONG}, RUN)
    endless = msgspec.structs.replace(requests(1)[0], sampling=Sampling(max_tokens=1000, ignore_eos=True))
    async with client.claim(RUN, holder="test") as lease:
        await publish(lease, step=0)
        await lease.submit_rollouts([endless])
        event = await warning(client)
        assert f"1 rollouts fill the longest attached ({SHORT})" in event.message
        assert f"max_model_len to the run's ({LONG})" in event.message
        await cluster.worker("w2", script=replace(SCRIPT, step_s=0.002, max_model_len=2 * LONG))
        async for one in lease.finished():
            assert len(unpack_tokens(one.tokens)) == LONG - 4  # where it ends is the run's to say
            assert one.reason is FinishReason.LENGTH
            break
