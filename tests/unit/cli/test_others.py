"""What other programs took of the cores."""

import psutil
import pytest

from ebbtide.demo.foreign_load import CoreUse, busy_s, cores, share_of_others


def test_a_niced_neighbour_interrupts_and_stolen_time_count_and_waiting_does_not() -> None:
    times = {"user": 4.0, "nice": 2.0, "system": 1.0, "irq": 0.5, "softirq": 0.25, "steal": 0.25}
    assert busy_s(times | {"idle": 100.0, "iowait": 50.0, "guest": 3.0, "guest_nice": 1.0}) == 8.0


def test_all_that_this_system_counts_is_known() -> None:
    now, total = cores(), psutil.cpu_times()
    assert total.user + total.system <= now.all_s + 10.0
    assert now.own_s > 0.0


def test_a_share_is_of_all_cores_without_what_is_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    assert share_of_others(CoreUse(0.0, 10.0, 5.0), CoreUse(10.0, 20.0, 10.0)) == pytest.approx(0.25)
    assert share_of_others(CoreUse(0.0, 10.0, 5.0), CoreUse(10.0, 15.0, 10.0)) == 0.0
