"""The arithmetic of the tenants benchmark."""

import pytest

from benchmarks.control_plane.measures import percentile
from benchmarks.tenants import compared, figures, table

ALONE = {"ack": [0.001 * number for number in range(1, 101)]}
BESIDE = {"ack": [0.002 * number for number in range(1, 101)]}


def test_percentiles_are_values_that_occurred() -> None:
    assert percentile(ALONE["ack"], 0.5) == pytest.approx(0.05)
    assert percentile(ALONE["ack"], 0.99) == pytest.approx(0.099)
    assert percentile([3.0], 0.99) == 3.0


def test_ratios_are_of_the_same_percentiles() -> None:
    row = compared(ALONE, BESIDE)["ack"]
    assert (row["p50_alone_ms"], row["p50_ms"], row["p50_ratio"]) == (50.0, 100.0, 2.0)
    assert (row["p99_ratio"], row["samples"]) == (2.0, [100, 100])


def test_the_worst_ratio_is_that_of_the_worst_kind_and_operation() -> None:
    found = figures({"runs": ALONE, "refused": ALONE}, {"runs": ALONE, "refused": BESIDE})
    assert (found["worst_p50_ratio"], found["worst_p99_ratio"]) == (2.0, 2.0)
    assert found["kinds"]["runs"]["p50_ratio"] == 1.0
    assert (found["kinds"]["runs"]["backs_off"], found["kinds"]["refused"]["backs_off"]) == (True, False)
    assert "worst ratios: p50 2.00 (promised 1.2), p99 2.00 (promised 2)" in table(found)
