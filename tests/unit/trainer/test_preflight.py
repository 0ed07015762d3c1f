"""What is told at submit of runs that would fail later."""

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest

from ebbtide.errors import InvalidRequest
from ebbtide.trainer import preflight
from ebbtide.trainer.conversation import load_conversations
from ebbtide.trainer.environments.number_guessing import NumberGuessingSource
from ebbtide.types.run import RunSpec, to_mapping


def make_spec(model: Path, **changes: Any) -> RunSpec:
    base: dict[str, Any] = {"name": "run", "model": str(model), "environment": {"name": "number_guessing"}}
    return msgspec.convert(base | {"sampling": {"max_tokens": 8}} | changes, RunSpec)


def refusal(spec: RunSpec) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        preflight.check(spec)
    return caught.value


def test_responses_that_do_not_fit_behind_a_prompt_are_refused_by_field(tiny_model: Path) -> None:
    conversations = load_conversations(str(tiny_model))
    prompt = len(conversations.opening(NumberGuessingSource({}, 0).make("train", 0).reset()))
    room = conversations.context - prompt
    preflight.check(make_spec(tiny_model, sampling={"max_tokens": room}))
    error = refusal(make_spec(tiny_model, sampling={"max_tokens": room + 1}))
    assert error.field == "sampling.max_tokens"
    assert f"at most {room} do" in str(error)


async def _train(client: Any, lease: Any, run: Any) -> None: ...


def test_a_trainer_that_cannot_be_imported_is_refused_by_field(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = ModuleType("trainer_for_tests")
    module.train = _train  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    preflight.check(make_spec(tiny_model, trainer={"name": "trainer_for_tests:train"}))
    for name in ("trainer_for_tests:other", "nowhere:train", "gpro"):
        assert refusal(make_spec(tiny_model, trainer={"name": name})).field == "trainer.name"


def test_of_a_run_that_brings_its_own_trainer_only_the_model_is_looked_at(tiny_model: Path) -> None:
    outside = {"trainer": {"name": "external"}, "environment": {"name": "a name for people"}}
    preflight.check(make_spec(tiny_model, **outside))
    assert refusal(make_spec(tiny_model / "nowhere", **outside)).field == "model"


def test_the_answer_names_the_field_in_json(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "spec.json"
    file.write_text(json.dumps(to_mapping(make_spec(tiny_model, sampling={"max_tokens": 4096}))))
    with pytest.raises(SystemExit) as ended:
        preflight.main([str(file)])
    assert ended.value.code == 2
    assert json.loads(capsys.readouterr().out)["field"] == "sampling.max_tokens"
