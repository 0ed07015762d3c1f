"""Engine processes die with the process that started them, a serving engine's too."""

import multiprocessing
from types import SimpleNamespace

import pytest

import ebbtide.runtime
from ebbtide.local_cluster import serving_engine
from ebbtide.rollout_worker.engine.vllm import cpu_build, vllm_plugin


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """What the plugin does in a process that was started by process 7."""
    found: list[tuple[str, int]] = []
    for variable in (vllm_plugin._OWNER, vllm_plugin._TIED):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(vllm_plugin, "_registered", True)
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: SimpleNamespace(pid=7))
    monkeypatch.setattr(ebbtide.runtime, "die_with_parent", lambda pid: found.append(("dies with", pid)))
    monkeypatch.setattr(vllm_plugin, "tie_spawned", lambda: found.append(("ties", 0)))
    monkeypatch.setattr(cpu_build, "is_cpu_build", lambda: True)
    monkeypatch.setattr(cpu_build, "yield_to", lambda pid: found.append(("yields to", pid)))
    return found


def test_engines_of_others_are_left_alone(calls: list[tuple[str, int]]) -> None:
    vllm_plugin.register()
    assert calls == []


def test_a_workers_engine_dies_with_it_and_yields_to_it(
    calls: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(vllm_plugin._OWNER, "7")
    vllm_plugin.register()
    assert calls == [("ties", 0), ("dies with", 7), ("yields to", 7)]


def test_a_local_clusters_serving_engine_dies_with_its_server_at_its_own_priority(
    calls: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable, value in serving_engine._TIED.items():
        monkeypatch.setenv(variable, value)
    vllm_plugin.register()
    assert calls == [("ties", 0), ("dies with", 7)]
