import json
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from ebbtide.environments import Message, Split, StepResult, load_source
from ebbtide.errors import InvalidRequest
from ebbtide.run_client import check_model_directory
from ebbtide.trainer.base_model.__main__ import main
from ebbtide.trainer.base_model.base_model import BaseModelProgress, make_base_model
from ebbtide.trainer.base_model.base_model_plan import BaseModelPlan, base_model_path
from ebbtide.trainer.learning.network import load_network, load_tokenizer

PLAN = BaseModelPlan(
    layers=1,
    hidden_size=32,
    heads=2,
    kv_heads=1,
    head_dim=16,
    feed_forward_size=32,
    batch=8,
    learning_rate=1e-2,
    warmup_steps=1,
    max_steps=60,
    error_rate=0.0,
    target_accuracy=0.4,
    check_prompts=16,
    check_every=5,
)


@dataclass
class Always:
    """Whatever is asked, the answer is `ok`."""

    identity: str = "always"

    def __post_init__(self) -> None:
        self.splits: set[str] = set()

    def make(self, split: Split, index: int) -> "Asked":
        self.splits.add(split)
        return Asked(index)

    def example(self, split: Split, index: int) -> tuple[list[Message], str]:
        return self.make(split, index).reset(), "ok"


@dataclass
class Asked:
    index: int

    def reset(self) -> list[Message]:
        return [Message("user", str(self.index))]

    def step(self, response: str) -> StepResult:
        right = float(response == "ok")
        return StepResult(reward=right, done=True, info={"right": right, "asked": 1.0})


def test_a_model_is_trained_to_the_target_saved_and_found_again(tmp_path: Path) -> None:
    source, seen = Always(), list[BaseModelProgress]()
    path = make_base_model(tmp_path, source, seed=0, plan=PLAN, progress=seen.append)
    check_model_directory(path)
    assert not load_network(path).config.tie_word_embeddings
    assert load_tokenizer(path).eos_token == "<|end|>"
    assert seen[-1].accuracy >= 0.4 > max(progress.accuracy for progress in seen[:-1])
    assert seen[-1].loss < seen[0].loss
    assert json.loads((path / "base_model.json").read_text())["accuracy"] == seen[-1].accuracy
    assert source.splits == {"train", "check"}, "the eval split is never looked at"
    seen.clear()
    assert make_base_model(tmp_path, source, seed=0, plan=PLAN, progress=seen.append) == path
    assert not seen
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


def test_other_inputs_make_another_model(tmp_path: Path) -> None:
    quick = replace(PLAN, target_accuracy=0.0, check_prompts=1, check_every=1)
    paths = {
        make_base_model(tmp_path, Always(), seed=0, plan=quick),
        make_base_model(tmp_path, Always(), seed=1, plan=quick),
        make_base_model(tmp_path, Always("other"), seed=0, plan=quick),
        make_base_model(tmp_path, Always(), seed=0, plan=replace(quick, error_rate=0.1)),
    }
    assert len(paths) == 4


def test_a_target_out_of_reach_is_told_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="2 steps") as caught:
        make_base_model(tmp_path, Always(), seed=0, plan=replace(PLAN, max_steps=2))
    assert caught.value.field == "target_accuracy"
    assert not list(tmp_path.iterdir())


def test_an_environment_without_examples_is_refused(tmp_path: Path) -> None:
    @dataclass
    class NoExamples:
        identity: str = "none"

        def make(self, split: Split, index: int) -> Asked:
            return Asked(index)

    with pytest.raises(InvalidRequest) as caught:
        make_base_model(tmp_path, NoExamples(), seed=0, plan=PLAN)
    assert caught.value.field == "environment.name"


def test_the_command_takes_error_rate_and_target_and_finds_such_a_model_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = tmp_path / "run.toml"
    spec.write_text('[environment]\nname = "number_guessing"\n')
    source = load_source("number_guessing", {}, 0)
    made = base_model_path(tmp_path, source, 0, BaseModelPlan(error_rate=0.05, target_accuracy=0.6))
    made.mkdir()
    (made / "base_model.json").touch()
    main(["--spec", str(spec), "--directory", str(tmp_path), "--error-rate", "0.05", "--target-accuracy", "0.6"])
    assert capsys.readouterr().out.strip() == str(made)
