"""An engine of one's own, by the path of its factory."""

from pathlib import Path

import pytest

from ebbtide.errors import InvalidRequest
from ebbtide.grants import Page
from ebbtide.rollout_worker import service
from ebbtide.rollout_worker.settings import WorkerSettings
from tests.fakes.scripted_engine import ScriptedEngine
from tests.fakes.scripted_settings import ScriptedSettings, engine_settings


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("scripted", "'scripted' is no engine; give vllm, or package.module:factory"),
        ("vllm:", "'vllm:' is no engine; give vllm, or package.module:factory"),
        (
            "nowhere.engine:make",
            "cannot be imported (No module named 'nowhere'); install its package, or add its folder",
        ),
        ("tests.fakes.scripted_engine:nothing", "has no attribute 'nothing'); install its package, or add its folder"),
    ],
)
def test_a_path_without_an_engine_is_refused_with_its_remedy(path: str, told: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        service.make_engine(WorkerSettings(engine=path, change_architecture=False))
    assert refused.value.field == "engine"
    assert told in str(refused.value)


def test_options_for_a_factory_are_not_for_vllm() -> None:
    with pytest.raises(InvalidRequest, match=r"vLLM takes vllm\.engine_args") as refused:
        service.make_engine(WorkerSettings(engine_options="{}", change_architecture=False))
    assert refused.value.field == "engine_options"


async def test_a_factory_gets_what_its_worker_was_told(monkeypatch: pytest.MonkeyPatch) -> None:
    got = list[tuple[WorkerSettings, Path | None, Page | None]]()

    def make(settings: WorkerSettings, model: Path | None, page: Page | None) -> ScriptedEngine:
        got.append((settings, model, page))
        return ScriptedEngine(ScriptedSettings())

    monkeypatch.setattr("tests.fakes.scripted_engine.make", make)
    settings = WorkerSettings(change_architecture=False, **engine_settings(ScriptedSettings(scores=True)))  # type: ignore[arg-type]
    service.make_engine(settings)
    assert got == [(settings, None, None)]
    assert settings.engine_options == '{"scores":true}'
