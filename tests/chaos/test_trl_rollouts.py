"""TRL's `rollout_func` on real services: completions are those of an undisturbed engine, whoever dies meanwhile."""

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from ebbtide.auth.security import ClientSecurity
from ebbtide.client import Client
from ebbtide.errors import InvalidRequest, LeaseSuperseded, NotReady, Unavailable
from ebbtide.trl import EbbtideRollouts
from ebbtide.types.run import Run, RunStatus
from tests.chaos.cluster import SCRIPT, TOKEN, Cluster
from tests.fakes.scripted_engine import END, follow
from tests.fakes.trl_trainer import ScriptedTrainer
from tests.support.waiting import wait_until

Answer = dict[str, list[Any]]
PROMPTS = [f"{first} 7 9" for first in (2, 3, 4, 5) for _ in range(4)]


@pytest.fixture
def rollouts(cluster: Cluster) -> Callable[..., EbbtideRollouts]:
    """Makes one that finds the cluster; its run is r."""

    def make(**settings: Any) -> EbbtideRollouts:
        places = {name: cluster.process[name].address for name in ("coordinator", "relay")}
        given: dict[str, Any] = {"run_id": "r", "security": ClientSecurity(token=TOKEN), **places, **settings}
        return EbbtideRollouts(**given)

    return make


async def generate(made: EbbtideRollouts, trainer: ScriptedTrainer, prompts: list[Any] = PROMPTS) -> Answer:
    return await asyncio.to_thread(made, prompts, trainer)


def check_completions(answer: Answer, length: int) -> None:
    """All are those of an engine that nobody disturbed."""
    for prompt, ids, logprobs in zip(
        *(answer[name] for name in ("prompt_ids", "completion_ids", "logprobs")), strict=True
    ):
        made = follow(SCRIPT, prompt, length)
        ended = next((number + 1 for number, (token, _) in enumerate(made) if token == END), length)
        assert list(zip(ids, logprobs, strict=True)) == made[:ended]


async def ended(client: Client) -> Run:
    run = await client.run("r")
    assert {run.counters.get(name, 0) for name in ("queued", "running", "finished", "bytes")} == {0}
    return run


async def test_each_generation_is_of_the_weights_of_its_step_and_each_completion_counts_once(
    cluster: Cluster, rollouts: Callable[..., EbbtideRollouts]
) -> None:
    client, trainer = await cluster.boot(), ScriptedTrainer()
    with rollouts(spec={"name": "mine", "seed": 3}) as made:
        assert made.run is None
        answers = []
        for _ in range(3):
            answers.append(await generate(made, trainer))
            trainer.step()
        trainer.model.train(mode=False)
        conversations = [[{"role": "user", "content": "2 7"}, {"role": "user", "content": "9"}] for _ in range(4)]
        answers.append(await generate(made, trainer, conversations))
        trainer.model.train()
        answers.append(await generate(made, trainer))  # of the weights that the evaluation had
        _, tensors = await client.fetch_weights("r")
    assert bytes(tensors["weight"].data) == trainer.model.weight.detach().numpy().tobytes()
    for answer in answers:
        check_completions(answer, 48)
    assert [set(answer["weight_version"]) for answer in answers] == [{1}, {2}, {3}, {4}, {4}]
    assert [len(answer["rollout_id"]) for answer in answers] == [16, 16, 16, 4, 16]
    run = await ended(client)
    assert (run.status, run.counters["trained"], run.dropped) == (RunStatus.FINISHED, 64, {})
    assert (run.spec.name, run.spec.seed, run.spec.batch.group_size, run.spec.trainer.steps) == ("mine", 3, 4, 4)
    sampling = run.spec.sampling
    assert (sampling.temperature, sampling.top_p, sampling.stop_token_ids) == (0.9, 0.8, (1,))
    steps = [event.values async for event in client.watch("r") if event.kind == "step"]
    assert steps == [{"step": step, "reward": 0.5} for step in (1.0, 2.0, 3.0)]


async def test_a_killed_worker_and_a_killed_coordinator_change_no_completion(
    cluster: Cluster, rollouts: Callable[..., EbbtideRollouts]
) -> None:
    client, trainer = await cluster.boot(recover_grace_s=0.5), ScriptedTrainer(length=96)
    with rollouts() as made:
        first = asyncio.create_task(generate(made, trainer))
        await wait_until(lambda: cluster.generated() > 16 * 16, what="tokens of the first step")
        busier = max(("w1", "w2"), key=lambda name: sum(record.generated for record in cluster.ledger(name)))
        cluster.kill(busier)
        answers = [await first]
        trainer.step()
        before = cluster.generated()
        second = asyncio.create_task(generate(made, trainer))
        await wait_until(lambda: cluster.generated() > before + 16 * 8, what="tokens of the second step")
        cluster.kill("coordinator")
        await cluster.coordinator()
        answers.append(await second)
    for answer in answers:
        check_completions(answer, 96)
    run = await ended(client)
    assert (run.status, run.counters["trained"], run.dropped) == (RunStatus.FINISHED, 32, {})
    trained = Counter(
        {
            name: len(ids)
            for answer in answers
            for name, ids in zip(answer["rollout_id"], answer["completion_ids"], strict=True)
        }
    )
    records = cluster.ledger()
    assert {record.rollout_id for record in records} == trained.keys()
    assert run.counters["tokens_stored"] == trained.total() <= sum(record.generated for record in records)
    assert any(record.start for record in records), "no rollout went on from its stored tokens"


async def test_a_training_that_fails_ends_its_run_and_keeps_nothing(
    cluster: Cluster, rollouts: Callable[..., EbbtideRollouts]
) -> None:
    client, trainer = await cluster.boot(workers=1), ScriptedTrainer()
    made = rollouts()

    async def training() -> None:
        with made:
            await generate(made, trainer)
            raise ZeroDivisionError("a reward function")

    with pytest.raises(ZeroDivisionError):
        await training()
    run = await ended(client)
    assert (run.status, run.message) == (RunStatus.FAILED, "ZeroDivisionError: a reward function")
    assert (run.counters.get("trained", 0), run.dropped) == (0, {"run_ended": 16})
    with pytest.raises(NotReady, match="another EbbtideRollouts"):
        await generate(made, trainer)


async def test_a_generation_ends_when_its_run_is_cancelled_or_nobody_generates(
    cluster: Cluster, rollouts: Callable[..., EbbtideRollouts]
) -> None:
    client, trainer = await cluster.boot(workers=0), ScriptedTrainer()
    made = rollouts(stall_s=0.5)
    with pytest.raises(Unavailable, match="16 are missing; 0 workers"):
        await generate(made, trainer)
    made.close(RunStatus.FAILED, "no workers")
    assert (await ended(client)).dropped == {"run_ended": 16}
    other = rollouts(run_id="other")
    waiting = asyncio.create_task(generate(other, trainer))

    async def queued() -> bool:
        runs = {run.run_id: run for run in await client.runs()}
        return "other" in runs and runs["other"].counters.get("queued") == 16

    await wait_until(queued, what="its rollouts")
    await client.cancel("other")
    with pytest.raises(LeaseSuperseded):
        await waiting
    other.close(RunStatus.FAILED)


async def test_what_cannot_be_served_is_named(cluster: Cluster, rollouts: Callable[..., EbbtideRollouts]) -> None:
    trainer = ScriptedTrainer()
    await cluster.boot(workers=0)
    trainer.args.generation_kwargs = {"num_beams": 2}
    with pytest.raises(InvalidRequest, match=r"generation_kwargs\.num_beams: is not known here"):
        await generate(rollouts(), trainer)
    trainer.args.generation_kwargs = None
    with pytest.raises(InvalidRequest, match=r"spec\.sampling"):
        await generate(rollouts(spec={"sampling": {}}), trainer)
