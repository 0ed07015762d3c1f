"""The engine's tokenizer, without an engine."""

from pathlib import Path

import pytest

from ebbtide.errors import InvalidRequest
from ebbtide.rollout_worker.engine.vllm.vllm_engine import VllmEngine, _load_tokenizer
from ebbtide.rollout_worker.settings import VllmSettings


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """As far as it is looked at before vLLM is."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").touch()
    return tmp_path


def test_without_a_tokenizer_only_stop_strings_are_refused(checkpoint: Path) -> None:
    assert _load_tokenizer(checkpoint) is None
    with pytest.raises(InvalidRequest) as caught:
        VllmEngine(str(checkpoint), 1, VllmSettings()).decode([1])
    assert caught.value.field == "sampling.stop"


def test_a_damaged_tokenizer_keeps_the_worker_from_starting(checkpoint: Path) -> None:
    (checkpoint / "tokenizer.json").write_text("{")
    with pytest.raises(InvalidRequest) as caught:
        _load_tokenizer(checkpoint)
    assert caught.value.field == "model"
