"""The frame of the migration benchmark: which levels run on what, and what becomes of their figures."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import migration
from benchmarks.arguments import output
from benchmarks.synthetic import CALM, CHURNY, write_lengths, write_trace
from ebbtide.simulator.scenario.input_tables import read_quantiles, read_spot_trace

#: Figures that readers of the file rely on, whatever else is in there.
FIGURES = {
    "acknowledged_tokens_lost", "acknowledged_tokens_doubled", "replay_share_of_fair_oracle", "share_generated_twice",
    "speedup_over_restart", "detection_p99_s", "resume_p50_s",
}  # fmt: skip

FOUND: dict[str, dict[str, Any]] = {
    "a": {"share_of_fair_oracle": 0.95, "share_generated_twice": 0.0001, "speedup_over_restart": 1.2},
    "b": {
        "acknowledged_tokens_lost": 0, "acknowledged_tokens_doubled": 0, "unequal_responses": 0,
        "share_generated_twice": 0.02, "detection_p99_s": 4.0, "kills": 4, "largest_logprob_gap": float("nan"),
    },
}  # fmt: skip


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[str], bool]]:
    """Stands for the levels: (level, names of its inputs, whether quick) of each that ran."""
    calls = []

    def run(level: str, inputs: migration.Inputs, *, quick: bool, tell: migration.Tell) -> dict[str, Any]:
        calls.append((level, [path.name for path in (*inputs.traces, *inputs.lengths)], quick))
        tell(f"level {level} runs")
        return {"figures": FOUND[level]}

    monkeypatch.setattr(migration, "run_level", run)
    return calls


def run(tmp_path: Path, *words: str) -> tuple[int, dict[str, Any]]:
    out = tmp_path / "results" / "migration.json"
    status = migration.main([*words, "--out", str(out)])
    return status, json.loads(out.read_text())


def test_all_figures_are_there_with_what_they_hold_under(ran: Any, tmp_path: Path) -> None:
    status, told = run(tmp_path, "--quick")
    assert status == 0
    assert told["figures"].keys() >= FIGURES
    assert [level for level, _, quick in ran if quick] == ["a", "b"]
    assert told["conditions"].keys() >= {"commit", "cores", "quick", "inputs", "levels", "seconds"}
    assert told["conditions"]["levels"]["a"]["what"] == "spot traces in simulated time"


def test_a_figure_that_was_not_measured_is_null_and_said_why(ran: Any, tmp_path: Path) -> None:
    _, told = run(tmp_path, "--levels", "b")
    assert told["figures"]["resume_p50_s"] is None
    assert told["missing"]["resume_p50_s"] == "level b brought none"
    assert told["missing"]["speedup_over_restart"] == "level a was not asked for"
    assert told["missing"]["largest_logprob_gap"] == "level b brought none"
    assert told["figures"]["largest_logprob_gap"] is None
    assert "unequal_responses" not in told["missing"]


def test_a_figure_of_one_level_does_not_pass_for_that_of_another(ran: Any, tmp_path: Path) -> None:
    _, told = run(tmp_path)
    assert told["figures"]["share_generated_twice"] == 0.0001
    assert told["figures"]["real_kills_share_generated_twice"] == 0.02
    assert told["figures"]["real_kills_kills"] == 4


def test_a_lost_token_makes_it_fail(
    ran: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(FOUND, "b", FOUND["b"] | {"acknowledged_tokens_lost": 2})
    status, told = run(tmp_path)
    assert (status, told["figures"]["acknowledged_tokens_lost"]) == (1, 2)
    assert "NOT KEPT" in capsys.readouterr().out


def test_the_oracle_that_speed_is_compared_with_is_explained(ran: Any, tmp_path: Path) -> None:
    _, told = run(tmp_path, "--levels", "a", "--cap", "16384")
    assert "knows every length and every loss" in told["notes"]["replay_share_of_fair_oracle"]
    assert told["conditions"]["cap_tokens"] == 16384


def test_figures_of_the_replay_bear_its_name_and_their_promise(
    ran: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(FOUND, "a", FOUND["a"] | {"balancing_over_none": 0.9, "moves_per_rollout": 0.1})
    status, told = run(tmp_path, "--levels", "a")
    assert (status, told["figures"]["replay_balancing_over_none"]) == (0, 0.9)
    assert told["figures"]["replay_moves_per_rollout"] == 0.1
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("replay_")]
    assert ["replay_balancing_over_none", "0.9", ">=", "0.995", "NOT", "KEPT"] in lines
    assert ["replay_moves_per_rollout", "0.1", "<=", "0.5"] in lines


def test_a_replay_in_which_a_policy_ended_no_step_fails(
    ran: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {"figures": FOUND["a"] | {"balancing_over_none": float("nan")}, "unknown": ["balancing_over_none"]}
    monkeypatch.setattr(migration, "run_level", lambda *_, **__: found)
    status, told = run(tmp_path, "--levels", "a")
    assert status == 1
    assert "balancing_over_none" in told["failed"]["a"]
    assert told["figures"]["replay_balancing_over_none"] is None


def test_a_slow_machine_does_not_make_it_fail_but_is_told(
    ran: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, _ = run(tmp_path)
    assert status == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("detection_p99_s")]
    assert line.split() == ["detection_p99_s", "4", "<=", "3", "NOT", "KEPT"]


def test_a_level_that_fails_leaves_the_others_their_figures(
    ran: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = migration.run_level

    def broken(level: str, inputs: migration.Inputs, *, quick: bool, tell: migration.Tell) -> dict[str, Any]:
        if level == "b":
            raise RuntimeError("no room")
        return whole(level, inputs, quick=quick, tell=tell)

    monkeypatch.setattr(migration, "run_level", broken)
    status, told = run(tmp_path)
    assert (status, told["failed"]) == (1, {"b": "RuntimeError: no room"})
    assert told["figures"]["replay_share_of_fair_oracle"] == 0.95
    assert told["figures"]["unequal_responses"] is None


def test_traces_and_lengths_that_are_named_run_level_a_on_them_alone(ran: Any, tmp_path: Path) -> None:
    trace, lengths = write_trace(CALM, tmp_path / "mine.csv"), write_lengths(tmp_path / "long.csv")
    run(tmp_path, "--trace", str(trace), "--lengths", str(lengths))
    run(tmp_path, "--trace", str(trace), "--lengths", str(lengths), "--levels", "ab")
    assert ran == [(level, ["mine.csv", "long.csv"], False) for level in ("a", "a", "b")]


def test_without_recorded_traces_synthetic_ones_are_made_and_said_to_be(
    ran: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(migration, "TRACES", tmp_path / "nowhere")
    _, told = run(tmp_path)
    assert all(said.startswith("synthetic: ") for said in told["conditions"]["inputs"].values())
    assert len(told["conditions"]["inputs"]) == 3


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--levels", "az"], "--levels: z is none of a, b"),
        (["--trace", "no/such.csv"], "--trace: no/such.csv cannot be read"),
        (["--lengths", __file__], "--lengths: "),
        (["--cap", "0"], "--cap: '0' is no whole number"),
        (["--cap", "-5"], "--cap: '-5' is no whole number"),
        (["--stretch", "0"], "--stretch: '0' is no number above 0"),
        (["--stretch", "nan"], "--stretch: 'nan' is no number above 0"),
        (["--stretch", "1", "inf"], "--stretch: 'inf' is no number above 0"),
        (["--out", f"{__file__}/x.json"], "--out: "),
        (["--out", "/proc/x.json"], "cannot be written"),
    ],
)
def test_bad_input_is_refused_by_name(
    ran: Any, tmp_path: Path, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        run(tmp_path, *words)
    assert said in capsys.readouterr().err
    assert ran == []


@pytest.mark.parametrize(
    ("flag", "table", "said"),
    [
        ("--trace", "t_s,event,node\nnan,add,a\n", ":2:"),
        ("--trace", "t_s,event,node\n0,remove,a\n", "leaves, but is not there"),
        ("--trace", "t_s,size\n0,1\n", "t_s"),
        ("--lengths", "quantile,output_tokens\n0.5,10\n", "two different ones"),
        ("--lengths", "tokens,cdf\n10,0.5\n5,0.9\n", ":3:"),
    ],
)
def test_a_table_that_cannot_be_is_refused_by_row_before_anything_runs(
    ran: Any, tmp_path: Path, flag: str, table: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "table.csv"
    path.write_text(table)
    with pytest.raises(SystemExit, match="2"):
        run(tmp_path, flag, str(path))
    told = " ".join(capsys.readouterr().err.split())
    assert said in told
    assert str(path) in told
    assert ran == []


def test_a_file_for_the_results_is_tried_before_the_run_and_left_as_it_is(tmp_path: Path) -> None:
    kept = tmp_path / "kept.json"
    kept.write_text("{}")
    assert output(str(kept)).read_text() == "{}"
    assert not output(str(tmp_path / "new" / "x.json")).exists()
    assert (tmp_path / "new").is_dir()


@pytest.mark.parametrize("churn", [CALM, CHURNY])
def test_a_synthetic_trace_holds_what_it_states(churn: Any, tmp_path: Path) -> None:
    path = write_trace(churn, tmp_path / "t.csv")
    again = write_trace(churn, tmp_path / "again.csv")
    assert path.read_text() == again.read_text()
    alive: set[str] = set()
    node_hours, losses, last, most = 0.0, 0, 0.0, 0
    for event in read_spot_trace(path, path.name).events:
        node_hours += len(alive) * (event.at_s - last) / 3600
        last, most = event.at_s, max(most, len(alive))
        if event.joins:
            alive.add(event.node)
        else:
            alive.remove(event.node)
            losses += 1
    assert most <= churn.nodes
    drawn = churn.losses_per_hour * (1 + churn.burst_share * (churn.burst - 1))
    assert losses / node_hours == pytest.approx(drawn, rel=0.3)


def test_synthetic_lengths_have_the_median_that_they_state(tmp_path: Path) -> None:
    path = write_lengths(tmp_path / "l.csv")
    assert read_quantiles(path, path.name).at(0.5) == pytest.approx(800, rel=0.01)
