"""The benchmark of elastic trainers: what its figures are made of, what it keeps, and what becomes of failing parts."""

import json
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from benchmarks.elastic import __main__ as benchmark
from benchmarks.elastic import elastic_part
from benchmarks.elastic.assumptions import VARIED, Assumptions
from benchmarks.elastic.compared.compared_windows import measured
from benchmarks.elastic.compared.kept_simulations import KeptSimulations, WantedSimulation
from benchmarks.elastic.compared.simulating_processes import each_simulated
from benchmarks.elastic.compared.varied_assumptions import assumption_table, failing
from benchmarks.elastic.elastic_figures import SimulatedResult, figures, further
from benchmarks.elastic.elastic_part import FIGURES, PARTS, PartFindings, PartTerms
from benchmarks.elastic.elastic_policies import CODE, OURS, PAPER, SAMPLES, VERL
from benchmarks.elastic.elastic_setting import ElasticCase, thinned
from benchmarks.elastic.lending import LendingResult, table

RESULT = SimulatedResult(
    case="14b aws",
    policy=OURS,
    tokens_per_s=110.0,
    tokens_per_dollar=10.0,
    step_s=[1.0],
    changed=0.5,
    instances=2.0,
    moved=0,
    cpu_s=1.0,
)
CHANGES = "t_s,count\n0,4\n10000,2\n20000,6\n30000,4\n"


def terms(folder: Path, **asked: object) -> PartTerms:
    base = PartTerms(quick=True, seed=0, jobs=1, tell=lambda _: None, kept=folder / "kept")
    return replace(base, **asked)


def beside(policy: str, speed: float, money: float = 5.0, case: str = RESULT.case) -> SimulatedResult:
    return replace(RESULT, policy=policy, tokens_per_s=speed, tokens_per_dollar=money, case=case)


def test_a_figure_is_the_worst_case_and_none_where_nothing_was_compared() -> None:
    found = figures([RESULT, beside(PAPER, 100.0), replace(RESULT, case="b"), beside(PAPER, 105.0, case="b")])
    assert found["throughput_over_rlboost_paper"] == pytest.approx(110 / 105, abs=1e-4)
    assert found["throughput_over_rlboost_code"] is None
    assert found["share_of_window_oracle"] is None


def test_rlboost_is_compared_where_the_fleet_changes_and_apart_from_that_where_it_does_not() -> None:
    calm = replace(RESULT, case="calm", changed=0.1)
    results = [RESULT, beside(CODE, 100.0), calm, beside(CODE, 109.0, case="calm")]
    assert figures(results)["throughput_over_rlboost_code"] == 1.1
    assert further(results)["calm_over_rlboost_code"] == pytest.approx(110 / 109, abs=1e-4)


def test_money_is_compared_with_baselines_of_the_same_staleness_that_trainers_of_groups_can_follow() -> None:
    results = [RESULT, beside(VERL, 1.0, money=8.0), beside("asynchronous", 1.0, 99.0), beside(SAMPLES, 1.0, 99.0)]
    assert figures(results)["tokens_per_money_over_best_baseline"] == 1.25


def test_loans_are_compared_with_none_seed_by_seed_and_without_the_first_step() -> None:
    took_s = {("ebbtide", 0): 10.0, ("ebbtide", 1): 20.0, ("never lent", 0): 20.0, ("never lent", 1): 30.0}
    results = [
        LendingResult(case="usual", seed=seed, policy=policy, step_s=[999.0, step_s], tokens_per_dollar=seed)
        for (policy, seed), step_s in took_s.items()
    ]
    rows = table(results)["usual"]
    assert rows["ebbtide"]["steps_over_never_lent"] == pytest.approx((2.0 + 1.5) / 2)
    assert rows["ebbtide"]["least_and_highest"] == [180.0, 360.0]


def test_claims_that_fail_under_an_assumption_are_told() -> None:
    assert failing({PAPER: 1.01, CODE: 1.2, VERL: 1.0}, changed=0.5) == [PAPER, VERL]
    assert failing({PAPER: 1.01, CODE: 1.05, VERL: 1.1}, changed=0.1) == []
    case = ElasticCase("14b", Path("aws.csv"), 8, assumed=Assumptions(boot_s=0.0))
    (row,) = assumption_table([RESULT, beside(PAPER, 112.0)], [case, case])
    assert row["case"] == "14b aws boot_s=0"
    assert row["claims_that_fail"] == [PAPER]


def test_each_varied_assumption_differs_from_the_usual_ones_in_one_thing() -> None:
    assert all(len(one.changed()) == 1 for one in VARIED)


def test_so_many_machines_of_a_trace_are_drawn_that_six_are_there_on_average(tmp_path: Path) -> None:
    trace = tmp_path / "counts.csv"
    trace.write_text("t_s,count\n0,12\n20000,24\n40000,24\n")
    spec = thinned(trace, Assumptions())
    mean = (12 * (20_000 - 7_200) + 24 * 20_000) / (40_000 - 7_200)
    assert spec.share == pytest.approx(6 / mean)
    assert spec.most == 6


def test_a_trace_of_events_is_drawn_like_one_of_counts(tmp_path: Path) -> None:
    counts, events = tmp_path / "counts.csv", tmp_path / "events.csv"
    counts.write_text("t_s,count\n0,20\n20000,19\n40000,19\n")
    joins = [f"0,add,n{number}" for number in range(20)]
    events.write_text("\n".join(["t_s,event,node", *joins, "20000,remove,n0", "40000,remove,n1"]))
    shares = [thinned(path, Assumptions()).share for path in (counts, events)]
    assert shares[0] == pytest.approx(shares[1])


def test_simulations_are_kept_and_made_again_when_an_input_changes(tmp_path: Path) -> None:
    trace = tmp_path / "spot.csv"
    trace.write_text(CHANGES)
    lines = list[str]()
    kept = KeptSimulations(tmp_path / "kept", lines.append)
    wanted = [WantedSimulation(ElasticCase("8b", trace, 1), "co-located")]
    first = kept.results(wanted, 1)
    assert kept.results(wanted, 1) == first
    assert lines[-1] == "1 simulations, 1 of them kept from before"
    trace.write_text(CHANGES.replace("30000,4", "30000,5"))
    kept.results(wanted, 1)
    assert "0 of them kept" in lines[-2]


def test_the_part_of_windows_brings_its_figures_and_says_which_are_missing(tmp_path: Path) -> None:
    trace = tmp_path / "spot.csv"
    trace.write_text(CHANGES)
    found = measured(terms(tmp_path, spot=(trace,), models=("8b",), policies=(OURS, CODE, VERL), steps=1))
    assert found.simulated
    assert found.figures["throughput_over_verl_hybrid"] is not None
    assert found.skipped.keys() == {name for name, value in found.figures.items() if value is None}
    assert [one["synthetic"] for one in found.details["traces"]] == [False]


def test_a_part_that_fails_leaves_the_others_figures_and_the_benchmark_ends_with_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(_: PartTerms) -> PartFindings:
        raise RuntimeError("no engine")

    def finds(_: PartTerms) -> PartFindings:
        return PartFindings(figures={"switch_steps_p99": 3.0})

    made = {PARTS["switches"]: finds, PARTS["gradient"]: breaks}
    monkeypatch.setattr(elastic_part, "import_module", lambda name: SimpleNamespace(measured=made[name]))
    out = tmp_path / "elastic.json"
    status = benchmark.main(["--parts", "switches", "gradient", "--out", str(out)])
    told = json.loads(out.read_text())
    assert status == 1
    assert list(told["figures"]) == list(FIGURES)
    assert told["figures"]["switch_steps_p99"] == 3.0
    assert told["failed"] == {"gradient": "RuntimeError: no engine"}
    assert told["skipped"].keys() == set(FIGURES) - {"switch_steps_p99"}
    assert told["skipped"]["streamed_gradient_error"] == "part gradient failed: RuntimeError: no engine"
    assert told["skipped"]["mixed_fleet_over_oracle"] == "part mixed was not run"


def test_the_simulation_that_fails_is_named(tmp_path: Path) -> None:
    wanted = [str(tmp_path / "there"), str(tmp_path / "missing" / "0")]
    runs = each_simulated(write_once, wanted, 1, lambda path: f"of {Path(path).name}")
    assert next(runs) == (wanted[0], None)
    with pytest.raises(RuntimeError, match="the simulation of 0 failed: FileNotFoundError"):
        next(runs)


def write_once(path: str) -> None:
    Path(path).touch(exist_ok=False)


def test_every_part_has_its_module_and_every_figure_its_part() -> None:
    assert all(find_spec(module) is not None for module in PARTS.values())
    assert set(FIGURES.values()) == set(PARTS)
