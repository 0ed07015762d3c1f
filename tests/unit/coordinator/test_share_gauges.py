"""Gauges of live runs' shares go with the runs."""

from prometheus_client import REGISTRY

from ebbtide.coordinator import metrics
from ebbtide.coordinator.state.coordinator_state import CoordinatorState
from ebbtide.types.run import EnvironmentSpec, RunShare, RunSpec

SPEC = RunSpec(name="n", model="m", environment=EnvironmentSpec(name="e"))


def shown(name: str, run_id: str) -> float | None:
    return REGISTRY.get_sample_value(f"ebbtide_coordinator_{name}", {"run": run_id})


def test_a_live_run_has_gauges_of_its_share_and_one_that_has_ended_none() -> None:
    run = CoordinatorState().add_run("gauged", SPEC)
    run.note_share(RunShare(lately=0.4, due=0.5, workers=3))
    metrics.observe([run], [])
    assert [shown(name, "gauged") for name in ("run_share", "run_share_due", "run_workers")] == [0.4, 0.5, 3.0]
    metrics.observe([], [])
    assert [shown(name, "gauged") for name in ("run_share", "run_share_due", "run_workers")] == [None] * 3


def test_of_very_many_live_runs_only_so_many_have_gauges() -> None:
    state = CoordinatorState()
    runs = [state.add_run(f"run{number}", SPEC) for number in range(metrics._RUNS_SHOWN + 5)]
    metrics.observe(runs, [])
    assert shown("run_share", "run0") is not None
    assert shown("run_share", f"run{len(runs) - 1}") is None
    metrics.observe([], [])
