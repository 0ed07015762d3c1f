"""Continuous balancing never loses to leaving rollouts where they are, in replays of spot traces.

The short cases are where the rule failed once: few machines, many losses, long responses. The whole table is nightly.
"""

from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from benchmarks.log_level import errors_only
from benchmarks.migration import gather_inputs
from benchmarks.replay.run import UNEVEN, TitledCase, figures, replay
from benchmarks.replay.setting import BALANCE, FAIR, MIGRATE, RESTART, Setting
from benchmarks.replay.trace_scenario import PlateauProfiles, ReplayCase, trace_scenario
from benchmarks.synthetic import Churn, write_trace
from ebbtide.simulator.scenario.input_tables import (
    QuantileTable,
    SpotTrace,
    TraceEvent,
    read_quantiles,
    read_spot_trace,
)
from ebbtide.simulator.world.simulation import Simulation

TRACES = Path(__file__).parents[4] / "shared" / "traces"
#: Lengths of a reasoning model: a mean of some 7,000 tokens, and one in fifty at the cap.
REASONING = QuantileTable(
    (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.98, 1.0),
    (200.0, 1_600.0, 2_900.0, 5_300.0, 9_500.0, 16_500.0, 32_768.0, 32_768.0),
    True,
)
FEW = Churn(nodes=4, hours=3, losses_per_hour=0.6, burst_share=0.1, burst=2, refill_s=300, seed=3)


def played(trace: SpotTrace, lengths: QuantileTable, policies: Any, *, hours: float, **setting: Any) -> dict[str, Any]:
    stretch = setting.pop("stretch", 1.0)
    given = structs.replace(Setting(), **setting)
    case = ReplayCase(trace=trace, lengths=lengths, stretch=stretch, setting=given, span_s=3_600.0 * hours)
    title = {"trace": "few", "lengths": "reasoning", "stretch": stretch, "slots": given.slots, "seed": given.seed}
    return replay([TitledCase(title, case, policies)], lambda _: None)[0]


@pytest.mark.parametrize(
    ("stretch", "uneven"),
    [
        (1.0, True),
        (4.0, False),
        pytest.param(1.0, False, marks=pytest.mark.nightly),
        pytest.param(4.0, True, marks=pytest.mark.nightly),
    ],
)
def test_with_four_machines_and_long_responses_moves_pay_and_are_few(
    tmp_path: Path, stretch: float, uneven: bool
) -> None:
    errors_only()
    trace = read_spot_trace(write_trace(FEW, tmp_path / "few.csv"), "few")
    unlike = {"spread": UNEVEN.spread, "context_tokens": UNEVEN.context_tokens} if uneven else {}
    found = played(trace, REASONING, (RESTART, MIGRATE, BALANCE), hours=2.0, rollouts=128, stretch=stretch, **unlike)
    rows = {row["policy"]: row for row in found["policies"]}
    balance = rows[BALANCE.name]
    assert balance["over_none"] >= 0.98
    assert balance["over_first"] >= 1.0
    assert balance["moves_per_rollout"] <= 0.5
    assert balance["share_generated_twice"] < 0.001


@pytest.mark.nightly
@pytest.mark.parametrize("uneven", [False, True])
def test_in_every_cell_of_the_table_balancing_keeps_its_promises(tmp_path: Path, uneven: bool) -> None:
    errors_only()
    inputs = gather_inputs([], [], (1.0, 4.0), tmp_path)
    lengths = {path.stem: path for path in (*inputs.lengths, *TRACES.glob("response_length_*.csv"))}
    given = UNEVEN if uneven else Setting()
    cases = []
    for trace in inputs.traces:
        for name, path in lengths.items():
            for stretch in (1.0, 4.0):
                for slots in (64, 8):
                    for seed in range(3):
                        setting = structs.replace(given, slots=slots, seed=seed)
                        case = ReplayCase(
                            trace=read_spot_trace(trace, str(trace)),
                            lengths=read_quantiles(path, str(path)),
                            stretch=stretch,
                            setting=setting,
                            span_s=10_800.0,
                        )
                        title = {"trace": trace.stem, "lengths": name, "stretch": stretch, "slots": slots, "seed": seed}
                        cases.append(TitledCase(title, case, (RESTART, MIGRATE, BALANCE, FAIR)))
    found = figures(replay(cases))
    assert found["balancing_over_none"] >= 0.995
    assert found["balancing_over_none_least_seed"] >= 0.98
    assert found["balancing_over_none_mean"] >= 1.03
    assert found["speedup_over_restart"] >= 1.0
    assert found["moves_per_rollout"] <= 0.5
    assert found["share_of_fair_oracle"] <= 1.0


@pytest.mark.parametrize("late_s", [20.0, 1_250.0])
def test_a_worker_that_joins_late_gets_running_rollouts_and_they_make_what_was_promised(late_s: float) -> None:
    """Also in the first step, in which nobody has seen an engine with few rollouts, or a long response."""
    errors_only()
    events = (TraceEvent(0.0, True, "n1"), TraceEvent(0.0, True, "n2"), TraceEvent(late_s, True, "n3"))
    trace = SpotTrace(events=(*events, TraceEvent(5_000.0, False, "n3")))
    setting = structs.replace(Setting(), rollouts=120)
    case = ReplayCase(trace=trace, lengths=REASONING, stretch=1.0, setting=setting, span_s=2_600.0)
    simulation = Simulation(trace_scenario(case, BALANCE), 0, BALANCE.policy, PlateauProfiles(setting))
    simulation.run(lambda _: None)
    (run,) = simulation._coordinator.state.runs.values()
    assert 6 <= run.moves.moves <= 60  # up to the third part of the rollouts, as far as that pays
    assert run.moves.judged > 5
    assert 0.8 < run.moves.kept < 1.2
    assert run.moves.trusted
