"""What TRL's settings and logs become, and what is refused before anything is generated."""

import asyncio
import math
from collections.abc import AsyncGenerator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ebbtide.errors import InvalidRequest, Unavailable
from ebbtide.trl import EbbtideRollouts, Generation, _TrainedRun, sampling_of, step_event, unique_tensors
from ebbtide.types.rollout import FinishedRollout, FinishReason, RolloutRequest
from ebbtide.types.run import RunEvent, Sampling
from ebbtide.types.tokens import pack_tokens
from tests.fakes.trl_trainer import ScriptedTrainer


def sampling(end_token_ids: tuple[int, ...] = (7, 9), **settings: Any) -> Any:
    return sampling_of(SimpleNamespace(**(vars(ScriptedTrainer().args) | settings)), end_token_ids)


def test_sampling_is_that_of_the_trainers_settings_and_ends_where_trl_says() -> None:
    made = sampling(top_k=None, min_p=0.1, generation_kwargs={"stop": "\n", "stop_token_ids": [9, 3], "min_tokens": 2})
    assert (made.temperature, made.top_p, made.top_k, made.min_p) == (0.9, 0.8, 0, 0.1)
    assert (made.max_tokens, made.min_tokens) == (48, 2)
    assert (made.stop, made.stop_token_ids) == (("\n",), (7, 9, 3))
    endless = sampling(generation_kwargs={"ignore_eos": True, "stop_token_ids": [3]})
    assert (endless.ignore_eos, endless.stop_token_ids) == (True, (3,))


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"generation_kwargs": {"min_tokens": 1, "seed": 3}}, "generation_kwargs.seed"),
        ({"generation_kwargs": {"min_tokens": 49}}, "GRPOConfig.min_tokens"),
        ({"temperature": math.inf}, "GRPOConfig.temperature"),
    ],
)
def test_a_setting_that_no_engine_has_here_is_named(settings: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        sampling(**settings)
    assert refused.value.field == field


@pytest.mark.parametrize(
    ("prompts", "attributes", "field"),
    [
        (["1"], {"tools": [print]}, "tools"),
        (["1"], {"environment_factories": {None: print}}, "environment_factory"),
        (["1"], {"adapter": True}, "peft_config"),
        (["1"], {"use_vllm": True}, "use_vllm"),
        ([[{"role": "user", "content": [{"type": "image", "image": None}]}]], {}, "prompt"),
    ],
)
def test_what_would_be_sampled_otherwise_than_it_is_trained_is_refused(
    prompts: list[Any], attributes: dict[str, Any], field: str
) -> None:
    trainer = ScriptedTrainer()
    trainer.tools = attributes.get("tools", [])
    trainer.environment_factories = attributes.get("environment_factories")
    trainer.args.use_vllm = attributes.get("use_vllm", False)
    if "adapter" in attributes:
        trainer.model.peft_config = {"default": None}
    with pytest.raises(InvalidRequest) as refused:
        EbbtideRollouts()(prompts, trainer)
    assert refused.value.field == field


def test_tied_tensors_are_published_once_and_parts_of_one_storage_each() -> None:
    whole = torch.arange(6.0).reshape(3, 2)
    tensors = {"embed": whole, "first": whole[0], "second": whole[1], "head": whole.view(3, 2), "empty": whole[:0]}
    assert [name for name, _ in unique_tensors(tensors)] == ["embed", "first", "second", "empty"]


def test_what_trl_logs_of_a_step_becomes_its_event() -> None:
    logged = {"step": 3, "reward": 0.25, "reward_std": "0.1", "kl": math.nan, "loss": math.inf, "entropy": 2}
    event = step_event(logged)
    assert event is not None
    assert (event.kind, event.key, event.message) == ("step", "3", "step 3: reward 0.250")
    assert event.values == {"step": 3.0, "reward": 0.25, "entropy": 2.0}
    for other in ({"step": 3, "eval_reward": 1.0}, {"train_runtime": 3.0}, {"step": 1, "reward": math.nan}):
        assert step_event(other) is None


def test_a_block_without_a_generation_has_no_run() -> None:
    with EbbtideRollouts(token="x") as rollouts:
        assert rollouts.run is None
    rollouts.close()


class ScriptedLease:
    """Answers each rollout at once, as a dead letter the first `dead` times."""

    run_id = "r"

    def __init__(self, dead: int) -> None:
        self._dead = dead
        self._ended: asyncio.Queue[FinishedRollout] = asyncio.Queue()
        self.submitted: list[str] = []
        self.dropped: list[tuple[str, str]] = []

    async def submit_rollouts(self, rollouts: Sequence[RolloutRequest], *, step: int, first_step: int) -> None:
        for one in rollouts:
            self.submitted.append(one.rollout_id)
            lost = len(self.submitted) <= self._dead
            ended = FinishedRollout(
                rollout_id=one.rollout_id,
                group_id=one.group_id,
                episode_id=one.episode_id,
                reason=FinishReason.DEAD_LETTERED if lost else FinishReason.STOP,
                tokens=pack_tokens([4], [-0.5], 3),
                message="no worker has room",
            )
            for _ in range(2):  # a reconnect repeats some
                await self._ended.put(ended)

    async def finished(self) -> AsyncGenerator[FinishedRollout, None]:
        while True:
            yield await self._ended.get()

    async def acknowledge(self, names: Sequence[str], drop_reason: str) -> None:
        self.dropped += [(name, drop_reason) for name in names if drop_reason]

    async def report(self, events: Sequence[RunEvent]) -> None:
        assert not events


async def generate(lease: Any) -> dict[str, list[Any]]:
    asked = Generation(prompts=[[1, 2]], group_size=1, step=0, sampling=Sampling())
    return await _TrainedRun(SimpleNamespace(), lease, stall_s=10).generate(asked, None, [])  # type: ignore[arg-type]


async def test_a_dead_letter_is_asked_for_again_and_its_account_is_closed() -> None:
    lease = ScriptedLease(dead=2)
    answer = await generate(lease)
    assert (answer["completion_ids"], answer["logprobs"], answer["weight_version"]) == ([[4]], [[-0.5]], [3])
    assert len(set(lease.submitted)) == 3
    assert answer["rollout_id"] == lease.submitted[2:]
    assert lease.dropped == [(name, "dead_lettered") for name in lease.submitted[:2]]


async def test_a_completion_that_fails_again_and_again_ends_the_generation() -> None:
    with pytest.raises(Unavailable, match="failed 3 times, at last so: no worker has room"):
        await generate(ScriptedLease(dead=3))
