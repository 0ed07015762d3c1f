"""What an engine on a GPU is asked for: sizes of steps and batches, and the memory of a borrowed one."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from ebbtide.errors import InvalidRequest
from ebbtide.rollout_worker import service
from ebbtide.rollout_worker.engine.vllm import borrowed_engine, cpu_build, vllm_engine
from ebbtide.rollout_worker.engine.vllm.borrowed_engine import BESIDE_BYTES, BorrowedEngine
from ebbtide.rollout_worker.engine.vllm.vllm_engine import VllmEngine
from ebbtide.rollout_worker.service import with_slots
from ebbtide.rollout_worker.settings import VllmSettings, WorkerSettings

GB = 10**9
MIB = 1 << 20
#: Of `model`: half precision.
STORED = 2 * 64 * 32


@pytest.fixture
def model(tmp_path: Path) -> Path:
    root = tmp_path / "model"
    root.mkdir()
    (root / "config.json").write_text("{}")
    save_file({"weight": np.zeros((64, 32), np.float16)}, root / "model.safetensors")
    return root


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU of 80 GB, and a vLLM that is built for it."""
    for module in (service, borrowed_engine, cpu_build):
        monkeypatch.setattr(module, "is_cpu_build", lambda: False)
    monkeypatch.setattr(borrowed_engine, "_device", lambda: "GPU-1")
    monkeypatch.setattr(vllm_engine, "device_bytes", lambda: 80 * GB)


def borrowed(tmp_path: Path) -> BorrowedEngine:
    return BorrowedEngine(tmp_path / "w1.page", 256)


def arguments(model: Path, engine: BorrowedEngine | None = None, **settings: Any) -> dict[str, Any]:
    made = VllmEngine(str(model), 128, VllmSettings(**settings), engine)
    if engine is not None:
        engine.learn(model, made._settings)
    return made._arguments()


@pytest.mark.usefixtures("gpu")
def test_a_gpu_runs_more_rollouts_at_once_and_longer_steps_than_a_cpu(model: Path) -> None:
    assert with_slots(WorkerSettings()).slots == 256
    assert with_slots(WorkerSettings(slots=7)).slots == 7
    assert arguments(model)["max_num_batched_tokens"] == 8192
    chosen = arguments(model, engine_args=json.dumps({"max_num_batched_tokens": 1024}))
    assert chosen["max_num_batched_tokens"] == 1024


def test_on_a_cpu_and_for_other_engines_nothing_changes(monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
    for module in (service, borrowed_engine, cpu_build):
        monkeypatch.setattr(module, "is_cpu_build", lambda: True)
    assert with_slots(WorkerSettings()).slots == 32
    assert with_slots(WorkerSettings(engine="own:make")).slots == 32
    assert "max_num_batched_tokens" not in arguments(model)


@pytest.mark.usefixtures("gpu")
def test_a_borrowed_engine_without_a_stated_cache_is_refused(tmp_path: Path, model: Path) -> None:
    with pytest.raises(InvalidRequest, match="required for a borrowed engine on a GPU") as refused:
        arguments(model, borrowed(tmp_path))
    assert refused.value.field == "vllm.kv_cache_mib"


@pytest.mark.usefixtures("gpu")
def test_a_borrowed_engine_asks_for_its_weights_its_cache_and_two_gigabytes(tmp_path: Path, model: Path) -> None:
    engine = borrowed(tmp_path)
    found = arguments(model, engine, kv_cache_mib=1000, gpu_memory_utilization=0.9)
    assert (engine.device, engine.kv_bytes) == ("GPU-1", 1000 * MIB)
    assert engine.weights_bytes == STORED + BESIDE_BYTES
    assert found["gpu_memory_utilization"] == pytest.approx((STORED + 1000 * MIB + 2 * GB) / (80 * GB))
    assert found["kv_cache_memory_bytes"] == 1000 * MIB
    assert found["max_num_batched_tokens"] == 256, "a borrowed engine's steps stay small"


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("settings", "expected"),
    [({"dtype": "float32"}, 2 * STORED), ({"tensor_parallel_size": 2}, STORED // 2), ({"dtype": "bfloat16"}, STORED)],
    ids=["wider", "shared", "alike"],
)
def test_weights_are_counted_as_they_lie_on_one_device(
    tmp_path: Path, model: Path, settings: dict[str, Any], expected: int
) -> None:
    engine = borrowed(tmp_path)
    engine.learn(model, VllmSettings(kv_cache_mib=1, **settings))
    assert engine.weights_bytes == expected + BESIDE_BYTES


@pytest.mark.usefixtures("gpu")
def test_what_no_device_has_is_refused_before_the_boot(tmp_path: Path, model: Path) -> None:
    with pytest.raises(InvalidRequest, match="the device has 80000000000") as refused:
        arguments(model, borrowed(tmp_path), kv_cache_mib=80_000)
    assert refused.value.field == "vllm.kv_cache_mib"
