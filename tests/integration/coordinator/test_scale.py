"""The scale benchmark runs from end to end, on a fleet of four."""

import pytest

from benchmarks.scale.__main__ import measure
from benchmarks.scale.plan import ScalePlan

SMALL = ScalePlan(
    workers=8, slots=4, silenced=1, kills=2, queued=24, runs=2, users=2, rate=2000.0, lengths=(1, 200), arrive_s=0.2,
    idle_s=0.2, steady_s=0.5, watched_s=0.2, finished=200, http_cases=100,
)  # fmt: skip


async def test_a_small_crowd_survives_its_losses_and_all_is_measured() -> None:
    found = await measure("crowd", SMALL)
    assert found["tokens_lost"] == found["tokens_doubled"] == found["lease_lapses_after_takeover"] == 0
    assert found["never_attached"] == found["takeover_never_attached"] == 0
    assert found["rollouts_checked"] > 0
    assert found["workers_lost_unasked"] == 0
    assert found["terms_per_kill"] == 1
    assert 2.0 < found["longest_death_notice_s"] < 12.0
    assert 0 < found["callback_p99_ms"] <= found["callback_max_ms"]
    assert found["decision_p99_ms"] > 0
    assert found["takeover_s"] >= max(found["takeover_submit_s"], found["takeover_append_s"])
    assert found["phases"].keys() == {"arrive", "idle", "fill", "work", "fall_silent", "lose_half", "take_over"}


async def test_bytes_are_measured_with_nothing_live() -> None:
    found = await measure("growth", SMALL)
    assert found["finished"] >= 180
    assert found["store_bytes_per_finished"] == pytest.approx(0, abs=2000)
    assert found["growth_tokens_lost"] == 0


async def test_generated_http_messages_go_through_the_guard() -> None:
    found = await measure("http", SMALL)
    assert found["http_cases"] == 100
    assert found["http_disagreements"] == 0
