"""A model folder's config.json is typed: what it says wrongly concerns its own run alone."""

from pathlib import Path
from unittest.mock import Mock

import pytest
from msgspec.structs import replace

from ebbtide.errors import InvalidRequest
from ebbtide.gateway.model import TextConfig, context_of, read_model_config
from ebbtide.gateway.runs import RunCatalog
from tests.fakes.scripted_rollouts import scripted_run

BROKEN = [
    "[]", "7", "{", "[" * 100_000, '{"text_config": "none"}', '{"max_position_embeddings": "many"}',
    '{"max_position_embeddings": {}}', '{"vocab_size": -1}', '{"text_config": {"vocab_size": [1]}}',
]  # fmt: skip


@pytest.mark.parametrize("text", BROKEN, ids=range(len(BROKEN)))
async def test_a_broken_config_is_refused_by_name_and_lists_its_run_without_a_context(
    text: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(InvalidRequest, match=r"^model: config\.json of .* cannot be read"):
        read_model_config(tmp_path)
    catalog = RunCatalog(Mock(), Mock(), Mock(), holder="g", model_roots=[str(tmp_path)], max_model_len=0)
    assert await catalog.context(scripted_run(model=str(tmp_path))) == 0
    assert await catalog.context(scripted_run(model=f"{tmp_path}/\0")) == 0


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the Hub whose models were fetched."""
    names: list[str] = []

    def fetch(model: str) -> Path:
        names.append(model)
        return Path("/absent")

    monkeypatch.setattr("ebbtide.gateway.runs.cached_model", lambda model: None)
    monkeypatch.setattr("ebbtide.gateway.runs.model_folder", fetch)
    return names


async def test_a_list_of_runs_fetches_no_model(fetched: list[str]) -> None:
    catalog = RunCatalog(Mock(), Mock(), Mock(), holder="g", model_roots=["/"], max_model_len=0)
    assert await catalog.context(scripted_run(model="owner/large")) == 0
    assert fetched == []


async def test_no_model_is_fetched_that_the_roots_do_not_allow(fetched: list[str], tmp_path: Path) -> None:
    catalog = RunCatalog(Mock(), Mock(), Mock(), holder="g", model_roots=[str(tmp_path)], max_model_len=0)
    with pytest.raises(InvalidRequest, match=r"model: .*is not below"):
        await catalog.model(scripted_run(model="owner/large"))
    assert fetched == []


@pytest.mark.parametrize(
    ("text", "context"),
    [
        ('{"max_position_embeddings": 512, "time_step_limit": [0.0, Infinity]}', 512),
        ('{"text_config": {"max_position_embeddings": 512}, "max_position_embeddings": 9}', 512),
        ('{"text_config": {}, "max_position_embeddings": 512}', 512),
        ('{"text_config": null, "max_position_embeddings": 512, "vocab_size": null}', 512),
    ],
)
def test_the_context_is_that_of_the_text_model(text: str, context: int, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    assert context_of(read_model_config(tmp_path), 0) == context


def test_a_config_that_states_no_context_needs_one_from_the_settings() -> None:
    with pytest.raises(InvalidRequest, match="set --max-model-len"):
        context_of(TextConfig(), 0)
    assert context_of(TextConfig(), 64) == 64


@pytest.mark.parametrize(
    ("setting", "run", "context"), [(0, 0, 512), (0, 64, 64), (64, 0, 64), (64, 96, 64), (96, 64, 64), (0, 4096, 512)]
)
async def test_a_gateways_context_is_the_shortest_of_model_setting_and_run(
    setting: int, run: int, context: int, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 512}')
    catalog = RunCatalog(Mock(), Mock(), Mock(), holder="g", model_roots=[str(tmp_path)], max_model_len=setting)
    found = scripted_run(model=str(tmp_path))
    assert await catalog.context(replace(found, spec=replace(found.spec, max_model_len=run))) == context
