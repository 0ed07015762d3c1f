"""The verdict on a replay, and its picture."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from ebbtide.demo.coserving.coserving_picture import write_coserving_picture
from ebbtide.demo.coserving.coserving_records import (
    BudgetMoment,
    ReplayRecord,
    ServedAnswer,
    TimeStretch,
    idle_s,
    inside,
    percentile,
)
from ebbtide.demo.coserving.coserving_report import CoservingReport, HarvestFigures, make_coserving, told
from ebbtide.types.grants import Borrower, GuardStatus

HARVEST = HarvestFigures(generated=50_000, lost=0, steps_s=30.0, trainer_cpu_s=12.0)
STATUS = GuardStatus(borrowers=(Borrower(worker_id="w", reclaims=9, reclaim_p50_s=0.004, reclaim_p99_s=0.012),))


def answer(sent: float, ttft: float = 0.1, tpot: float = 0.01, *, output: int = 11, failed: str = "") -> ServedAnswer:
    first = sent + ttft
    return ServedAnswer(
        due=sent - 0.001, sent=sent, first=first, last=first + tpot * (output - 1), prompt=8, output=output,
        failed=failed,
    )  # fmt: skip


def judged(beside: list[ServedAnswer]) -> CoservingReport:
    alone = [answer(float(second)) for second in range(100)]
    stretches = (TimeStretch("alone", 0.0, 100.0), TimeStretch("beside", 100.0, 200.0))
    replay = ReplayRecord(title="", answers=(*alone, *beside), stretches=stretches, ttft_s=0.16, tpot_s=0.0127)
    return make_coserving("bursts", replay, HARVEST, STATUS)


def test_as_many_within_both_targets_as_asked_for_attain_the_slo() -> None:
    slow = [answer(150.5, ttft=0.2)]
    found = judged([answer(100.0 + at) for at in range(99)] + slow)
    assert found.slo_attained
    assert (found.alone.attained, found.beside.attained) == (1.0, 0.99)
    assert found.beside.ttft_p50_ms == pytest.approx(100.0)


@pytest.mark.parametrize(
    "bad",
    [
        [answer(150.5, ttft=0.2), answer(160.5, tpot=0.02)],
        [answer(150.5, failed="ServerDisconnectedError")],
    ],
    ids=["two of a hundred are late", "one failed"],
)
def test_more_that_are_late_or_any_that_failed_miss_it(bad: list[ServedAnswer]) -> None:
    found = judged([answer(100.0 + at) for at in range(99)] + bad)
    assert not found.slo_attained
    name, verdict = next(iter(told(found)))
    assert (name, verdict.split(":")[0]) == ("SLO", "MISSED")


def test_idle_time_is_what_no_request_covers_and_what_was_used_of_it_is_told() -> None:
    found = judged([answer(100.0, ttft=1.0, tpot=4.9), answer(120.0, ttft=5.0, tpot=2.0)])
    assert found.idle_s == pytest.approx(50.0)
    assert found.idle_used == pytest.approx(0.6)
    assert found.beside.load == pytest.approx(0.5)
    lines = dict(told(found))
    assert lines["harvested"] == "50,000 tokens (500/s), 0 of them lost"
    assert lines["taken back"].startswith("9 times, p50 4.0 ms, p99 12.0 ms")
    assert lines["idle time"] == "50 of 100 s; rollout steps ran in 30 s of it (60%), the trainer took 12 core-seconds"


def test_programs_that_have_no_part_in_it_are_told_of() -> None:
    quiet = judged([answer(100.0 + at) for at in range(10)])
    assert "disturbed" not in dict(told(quiet))
    noisy = replace(quiet, alone=replace(quiet.alone, others=0.31), beside=replace(quiet.beside, others=0.6))
    assert "31% of the cores alone, 60% during the run" in dict(told(noisy))["disturbed"]


def test_overlapping_requests_are_counted_together_and_failed_ones_not() -> None:
    answers = [answer(0.0, ttft=1.0, tpot=0.1), answer(1.5, ttft=1.0, tpot=0.1), answer(1.0, failed="gone")]
    assert inside(answers) == [(0.0, 1), (1.5, 2), (2.0, 1), (3.5, 0)]
    assert idle_s(answers, -1.0, 5.0) == pytest.approx(2.5)
    assert idle_s([], 3.0, 5.0) == 2.0


def test_a_percentile_is_a_value_that_so_many_do_not_exceed() -> None:
    values = [float(number) for number in range(100, 0, -1)]
    assert [percentile(values, share) for share in (0.5, 0.95, 0.99, 1.0)] == [50, 95, 99, 100]
    assert percentile([7.0]) == 7.0
    assert percentile([]) == 0.0


@pytest.mark.parametrize(
    "answers", [(), (answer(1.0), answer(2.0, output=2), answer(3.0, ttft=0.5), answer(4.0, failed="x"))]
)
def test_the_picture_is_drawn_of_whatever_there_is(tmp_path: Path, answers: tuple[ServedAnswer, ...]) -> None:
    moments = tuple(
        BudgetMoment(at_s=at / 10, tokens=at % 3 * 100, generated=40 * at, training=at % 2 == 0) for at in range(50)
    )
    stretches = (TimeStretch("alone", 0.0, 2.0), TimeStretch("beside", 2.0, 5.0))
    drawn = ReplayRecord(title="[a $ title]", answers=answers, ttft_s=0.2, tpot_s=0.02)
    replay = replace(drawn, moments=moments, stretches=stretches) if answers else drawn
    write_coserving_picture(replay, tmp_path / "timeline.png")
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")
