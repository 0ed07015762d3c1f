"""What is told at submit of runs that would fail later."""

import json
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from ebbtide.cli.submit_preflight import check_deeply
from ebbtide.environments.number_guessing import NumberGuessingSource
from ebbtide.errors import InvalidRequest
from ebbtide.run_client import load_conversations
from ebbtide.run_settings import AllowedEnvironments
from ebbtide.trainer import trainer_preflight
from ebbtide.trainer.service import check_trainable
from ebbtide.trainer.settings import TrainerSettings
from ebbtide.types.run import RunSpec, to_mapping

SETTINGS = TrainerSettings(allowed_trainers=("*",))


def make_spec(model: Path, **changes: Any) -> RunSpec:
    base: dict[str, Any] = {"name": "run", "model": str(model), "environment": {"name": "number_guessing"}}
    return msgspec.convert(base | {"sampling": {"max_tokens": 8}} | changes, RunSpec)


def refusal(spec: RunSpec) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        trainer_preflight.check(spec, SETTINGS)
    return caught.value


def test_verifiers_that_cannot_be_imported_are_refused(tiny_model: Path) -> None:
    allowed = msgspec.structs.replace(SETTINGS, environments=AllowedEnvironments(allowed=("*",)))
    for verifier, refused in (("json:loads", False), ("nowhere_at_all:it", True), ("json:nothing", True)):
        spec = make_spec(tiny_model, environment={"name": "agents", "verifiers": {"exact": verifier}})
        if refused:
            with pytest.raises(InvalidRequest, match=r"environment\.verifiers: cannot import"):
                trainer_preflight.check(spec, allowed)
        else:
            trainer_preflight.check(spec, allowed)
        with pytest.raises(InvalidRequest, match=r"environment\.verifiers\.exact: .* is not allowed here"):
            trainer_preflight.check(spec, SETTINGS)


def test_responses_that_do_not_fit_behind_a_prompt_are_refused_by_field(tiny_model: Path) -> None:
    conversations = load_conversations(str(tiny_model))
    prompt = len(conversations.opening(NumberGuessingSource({}, 0).make("train", 0).reset()))
    room = conversations.context - prompt
    trainer_preflight.check(make_spec(tiny_model, sampling={"max_tokens": room}), SETTINGS)
    error = refusal(make_spec(tiny_model, sampling={"max_tokens": room + 1}))
    assert error.field == "sampling.max_tokens"
    assert f"at most {room} do" in str(error)


def test_a_runs_own_context_holds_its_responses_and_is_no_longer_than_the_models(tiny_model: Path) -> None:
    conversations = load_conversations(str(tiny_model))
    prompt = len(conversations.opening(NumberGuessingSource({}, 0).make("train", 0).reset()))
    own = {"max_model_len": prompt + 8}
    trainer_preflight.check(make_spec(tiny_model, sampling={"max_tokens": 8}, **own), SETTINGS)
    error = refusal(make_spec(tiny_model, sampling={"max_tokens": 9}, **own))
    assert error.field == "sampling.max_tokens"
    assert "into the run's max_model_len" in str(error)
    assert refusal(make_spec(tiny_model, max_model_len=conversations.context + 1)).field == "max_model_len"


def test_a_trainer_whose_windows_are_planned_takes_no_stream_of_the_groups_that_are_whole_first(
    tiny_model: Path,
) -> None:
    rounds: dict[str, Any] = {"tail": {"rounds": "whole_groups"}, "batch": {"max_staleness": 1}}
    spec = make_spec(tiny_model, trainer={"streaming": True}, **rounds)
    check_trainable(spec, SETTINGS)
    check_trainable(make_spec(tiny_model, **rounds), replace(SETTINGS, generate=True))
    check_trainable(spec, replace(SETTINGS, generate=True, window_s=9.0))
    with pytest.raises(InvalidRequest, match=r"tail\.rounds: .*set window_s"):
        check_trainable(spec, replace(SETTINGS, generate=True))


async def _train(client: Any, lease: Any, run: Any) -> None: ...


def test_a_trainer_that_cannot_be_imported_is_refused_by_field(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = ModuleType("trainer_for_tests")
    module.train = _train  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    trainer_preflight.check(make_spec(tiny_model, trainer={"name": "trainer_for_tests:train"}), SETTINGS)
    for name in ("trainer_for_tests:other", "nowhere:train", "gpro"):
        assert refusal(make_spec(tiny_model, trainer={"name": name})).field == "trainer.name"


def test_of_a_run_that_brings_its_own_trainer_only_the_model_is_looked_at(tiny_model: Path) -> None:
    outside = {"trainer": {"name": "external"}, "environment": {"name": "a name for people"}}
    trainer_preflight.check(make_spec(tiny_model, **outside), SETTINGS)
    assert refusal(make_spec(tiny_model / "nowhere", **outside)).field == "model"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("model.safetensors", ""),
        ("model.safetensors.index.json", '{"weight_map": []}'),
        ("model.safetensors.index.json", '{"weight_map": {"a": 3}}'),
        ("tokenizer.json", '{"model": 3}'),
        ("tokenizer.json", '{"added_tokens": [{}]}'),
        ("config.json", '{"text_config": null}'),
    ],
)
def test_a_damaged_checkpoint_is_refused_as_the_model(
    tiny_model: Path, tmp_path: Path, name: str, content: str
) -> None:
    shutil.copytree(tiny_model, tmp_path / "model")
    (tmp_path / "model" / name).write_text(content)
    error = refusal(make_spec(tmp_path / "model"))
    assert error.field == "model"
    assert "is damaged" in str(error)


def test_weights_that_were_cut_off_are_refused_as_the_model(tiny_model: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_model, tmp_path / "model")
    weights = tmp_path / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert "model.safetensors' is damaged" in str(refusal(make_spec(tmp_path / "model")))


def test_the_answer_names_the_field_in_json(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "spec.json"
    file.write_text(json.dumps(to_mapping(make_spec(tiny_model, sampling={"max_tokens": 4096}))))
    with pytest.raises(SystemExit) as ended:
        trainer_preflight.main([str(file)])
    assert ended.value.code == 2
    assert json.loads(capsys.readouterr().out)["field"] == "sampling.max_tokens"


ENVIRONMENT = """
import time
from ebbtide.errors import InvalidRequest
print("an environment that talks")
def slow(params, seed):
    time.sleep(600)
def picky(params, seed):
    raise InvalidRequest("is too small", field="environment.params.size")
"""


@pytest.mark.parametrize(
    ("factory", "field", "patience_s"), [("picky", "environment.params.size", 60.0), ("slow", "environment", 0.2)]
)
def test_an_environment_that_talks_or_hangs_is_told_by_field(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, factory: str, field: str, patience_s: float
) -> None:
    (tmp_path / "talkative.py").write_text(ENVIRONMENT)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("EBBTIDE_ENVIRONMENTS_ALLOWED", "talkative:*")
    with pytest.raises(InvalidRequest) as refused:
        check_deeply(make_spec(tiny_model, environment={"name": f"talkative:{factory}"}), patience_s)
    assert refused.value.field == field
