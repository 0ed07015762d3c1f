"""The arithmetic of the scale benchmark: what it takes for a callback, a decision, a byte and a lost token."""

import asyncio
import time
from array import array
from typing import Any

import pytest

from benchmarks.scale.figures import PROMISED, beyond, chosen, missing, table
from benchmarks.scale.growth import slope
from benchmarks.scale.loop_probe import LoopProbe, bytes_in_use, probed_loop, summary
from benchmarks.scale.plan import QUICK, ScalePlan


def test_percentiles_are_values_that_occurred() -> None:
    found = summary(array("f", [number / 1000 for number in range(200, 0, -1)]))
    assert found == {"p50_ms": 100.0, "p99_ms": 198.0, "max_ms": 200.0, "count": 200}


def test_without_values_there_is_no_percentile() -> None:
    assert summary(array("f")) == {"p50_ms": None, "p99_ms": None, "max_ms": None, "count": 0}


def test_bytes_per_rollout_are_the_slope_of_the_points() -> None:
    assert slope([1000, 2000, 3000, 4000, 5000], [70, 71_070, 142_070, 213_070, 284_070]) == pytest.approx(71)
    assert slope([1, 2, 3], [5, 5, 5]) == 0


def busy(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def test_a_probed_loop_tells_the_cpu_time_of_callbacks_and_of_those_that_decide() -> None:
    probe = LoopProbe()

    async def decide() -> None:
        busy(0.03)
        await asyncio.sleep(0.2)  # no CPU time

    async def main() -> None:
        asyncio.get_running_loop().call_soon(busy, 0.05)
        await asyncio.create_task(decide(), name="decide")

    loop = probed_loop(probe)
    loop.run_until_complete(main())
    loop.close()
    found = probe.read()
    assert 50 <= found["callbacks"]["max_ms"] < 100
    assert 30 <= found["decisions"]["max_ms"] < 50
    assert found["decisions"]["count"] == 2
    assert [one["name"].partition(":")[0] for one in found["longest"][:2]] == ["busy", "decide"]


def test_the_bytes_in_use_are_those_of_live_objects() -> None:
    before = bytes_in_use()
    kept = [bytes(100) for _ in range(10_000)]
    large = bytes(10_000_000)
    assert bytes_in_use() - before == pytest.approx(10_000 * 144 + 10_080_000, rel=0.02)
    del kept, large
    assert bytes_in_use() - before < 50_000


FOUND: dict[str, Any] = {
    "workers": 1000,
    "callback_max_ms": 180.0,
    "tokens_lost": 1,
    "growth_tokens_lost": 2,
    "token_path_tokens_lost": 3,
    "phases": {},
}


def test_tokens_lost_in_any_part_count() -> None:
    assert chosen(FOUND) == {"workers": 1000, "callback_max_ms": 180.0, "tokens_lost": 6}


def test_a_figure_that_was_not_measured_is_left_out_with_the_reason() -> None:
    assert missing(FOUND).keys() | chosen(FOUND).keys() == PROMISED.keys()
    assert missing(FOUND)["http_disagreements"] == "its part did not run"
    told = {"figures": chosen(FOUND), "missing": missing(FOUND), "baseline": {"figures": {"callback_max_ms": 230.0}}}
    lines = table(told).splitlines()
    assert next(line.split() for line in lines if "callback_max" in line) == [
        "callback_max_ms",
        "180.0",
        "<=",
        "150",
        "230.0",
    ]
    assert any("http_disagreements" in line and "did not run" in line for line in lines)


def test_only_a_figure_beyond_the_allowed_part_of_its_promise_fails() -> None:
    figures = {"workers": 1000, "callback_max_ms": 180.0, "takeover_s": 10.1, "workers_lost_unasked": 0}
    assert beyond(figures, 1.0) == ["callback_max_ms", "takeover_s"]
    assert beyond(figures, 2.0) == []
    assert beyond(figures | {"workers_lost_unasked": 2}, 2.0) == []
    assert beyond(figures | {"workers_lost_unasked": 3}, 2.0) == ["workers_lost_unasked"]


def test_a_quick_run_has_the_whole_fleet() -> None:
    fleet = ("workers", "slots", "queued", "runs", "users", "rate", "token_rate")
    assert all(getattr(QUICK, name) == getattr(ScalePlan(), name) for name in fleet)
    assert QUICK.finished == 100_000
