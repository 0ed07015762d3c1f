"""The figures of both pools, from made-up runs: whose device it was, throughput and money."""

from pathlib import Path

import pytest

from ebbtide.cli.views.run import RunProgress
from ebbtide.demo.demo_report import make_report
from ebbtide.demo.elastic.elastic_picture import owner_strips, write_elastic_picture
from ebbtide.demo.elastic.elastic_report import (
    ELASTIC,
    FIXED,
    ElasticReport,
    MachinePrices,
    PoolRun,
    device_shares,
    elastic_report,
    elastic_summary,
    step_tokens,
)
from ebbtide.demo.elastic.spot_machines import MachineStay
from ebbtide.demo.token_accounts import TokenAccounts
from ebbtide.types.device_turns import HELD, LENT, RETURNING, DeviceTurn
from ebbtide.types.run import EnvironmentSpec, Run, RunEvent, RunSpec, RunStatus

PRICES = MachinePrices(reserved=36.0, spot=18.0)
SPEC = RunSpec(name="demo", model="m", environment=EnvironmentSpec(name="e"))
COUNTERS = {"submitted": 9, "trained": 9}


def pool_run(
    name: str, ends: list[float], *, stays: list[MachineStay], turns: list[DeviceTurn], reserved: int
) -> PoolRun:
    """A run of steps that ended then, with 1,000 tokens each."""
    progress = RunProgress(name)
    for step, at_s in enumerate(ends, start=1):
        values = {"step": float(step), "tokens": 1000.0, "reward": 0.5, "seconds_wait": 1.0, "seconds_train": 3.0}
        progress.apply(RunEvent(kind="step", values=values, age_s=at_s))
    run = Run(run_id=name, spec=SPEC, status=RunStatus.FINISHED, counters=COUNTERS)
    accounts = TokenAccounts(generated=5000, by_worker={}, lost={}, interrupted=0)
    return PoolRun(
        name=name,
        report=make_report(progress, run, accounts, kills=[], seconds={"run": 50.0}, flush_tokens=8),
        step_at_s=progress.step_at_s,
        step_tokens=step_tokens(progress.steps),
        turns=turns,
        stays=stays,
        reserved=reserved,
        others=0.0,
    )


def stay(begin_s: float, ready_s: float | None, end_s: float | None) -> MachineStay:
    return MachineStay(worker=f"worker-{begin_s:g}", core=1, begin_s=begin_s, ready_s=ready_s, end_s=end_s)


@pytest.fixture
def report() -> ElasticReport:
    turns = [
        DeviceTurn(HELD, 0.0, 5.0),
        DeviceTurn(LENT, 5.0, 14.0),
        DeviceTurn(RETURNING, 14.0, 15.0),
        DeviceTurn(HELD, 15.0, 40.0),
    ]
    stays = [stay(0.0, 0.0, 12.0), stay(20.0, 24.0, None)]
    elastic = pool_run(ELASTIC, [10.0, 20.0, 30.0], stays=stays, turns=turns, reserved=1)
    fixed = pool_run(FIXED, [12.0, 28.0, 52.0], stays=[], turns=[], reserved=2)
    return elastic_report(elastic, fixed, PRICES, machines="a trace", notice_s=2.0)


def test_the_first_step_is_not_counted(report: ElasticReport) -> None:
    ours, theirs = report.elastic, report.fixed
    assert (ours.steps, ours.seconds, ours.tokens, ours.tokens_per_s) == (2, 20.0, 2000, 100.0)
    assert (theirs.seconds, theirs.tokens_per_s) == (40.0, 50.0)
    assert report.throughput_over_fixed == 2.0


def test_a_spot_machine_is_paid_from_its_arrival_to_its_loss_and_a_reserved_one_always(report: ElasticReport) -> None:
    ours, theirs = report.elastic, report.fixed
    assert (ours.reserved_s, ours.spot_s, ours.spot_idle_s, ours.lost) == (20.0, 2.0 + 10.0, 4.0, 1)
    assert ours.money == pytest.approx(20 * 0.01 + 12 * 0.005)
    assert (theirs.reserved_s, theirs.spot_s) == (80.0, 0.0)
    assert theirs.money == pytest.approx(80 * 0.01)
    assert report.tokens_per_money_over_fixed == pytest.approx(0.8 / 0.26)


def test_the_device_has_an_owner_at_each_moment(report: ElasticReport) -> None:
    assert report.elastic.device == {HELD: 0.75, LENT: 0.2, RETURNING: 0.05}
    assert report.fixed.device == {HELD: 1.0, LENT: 0.0, RETURNING: 0.0}
    assert device_shares([DeviceTurn(LENT, 0.0, 4.0)], 2.0, 4.0) == {HELD: 0.0, LENT: 1.0, RETURNING: 0.0}


def test_the_summary_says_that_prices_are_assumed_and_what_each_pool_made_of_them(report: ElasticReport) -> None:
    told = dict(elastic_summary(report, Path("report.json")))
    assert told["throughput"] == "100 trained tokens/s elastic, 50 fixed: 2.00 times"
    assert told["prices"].startswith("assumed: 36 for a reserved machine per hour, 18 for a spot one")
    assert told["spot machines"] == "1 lost with a notice of 2 s, 4 s of booting; by a trace"
    assert "the sums agree" in told["elastic run"]
    assert "disturbed" not in told


def test_the_strip_has_a_row_for_each_machine_on_one_scale_of_time(report: ElasticReport) -> None:
    elastic, device, spot, fixed, alone, reserved, legend = owner_strips(report.runs, width=19 + 52)
    assert elastic[:7] == "elastic"
    assert device[19:] == "█████░░░░░░░░░▒███████████████"
    assert spot[19:] == "━━━━━━━━━━━━        ····━━━━━━"
    assert fixed[:5] == "fixed"
    assert alone[19:] == 52 * "█"
    assert reserved[19:] == 52 * "━"
    assert legend[19:].startswith("0 to 52 s")


def test_the_picture_is_a_picture(report: ElasticReport, tmp_path: Path) -> None:
    write_elastic_picture(report, tmp_path / "report.png")
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")
