"""What TRL's settings and logs become, and what is refused before anything is generated."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ebbtide.errors import InvalidRequest
from ebbtide.trl import EbbtideRollouts, sampling_of, step_event, unique_tensors
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
