"""What a person sees of a serving-guard."""

import io
import json

import pytest
from msgspec.structs import replace
from rich.console import Console

from ebbtide.cli.views.guard import head, lines, picture, small_picture
from ebbtide.cli.views.tables import to_json
from ebbtide.types.grants import Borrower, Forecast, GuardStatus, Latency, ModelLatency, Residency

BUSY = Borrower(
    worker_id="w1", state="granted", running=32, tokens_per_s=3344.4, tokens_harvested=1_234_567, gpu_seconds=345.67,
    kv_bytes=256_000_000, kv_bytes_used=64_000_000, memory="normal", residency=Residency.HOST, reclaims=1_042,
    reclaim_p50_s=0.0061, reclaim_p99_s=0.0184, stops=1, recomputed_tokens=77,
)  # fmt: skip
STATUS = GuardStatus(
    model="chat",
    mode="proxy",
    state="shared",
    inside=3,
    waiting=1,
    load=0.349,
    requests=5_306,
    failed=2,
    ttft=Latency(p50=0.11, p95=0.3, p99=0.466, target=0.75, attained=0.9987, unloaded=0.1),
    tpot=Latency(p50=0.0101, p95=0.02, p99=0.0431, target=0.04, attained=0.981, unloaded=0.009),
    slack_s=0.0123,
    tokens=96,
    sequences=24,
    borrowers=(BUSY,),
    forecast=Forecast(share=0.62, spell_s=8.25, disturbance=0.03),
    memory_limit=1_000_000_000,
    serving_kv_bytes=300_000_000,
    uptime_s=3_605.0,
)


def shown(status: GuardStatus) -> str:
    out = io.StringIO()
    Console(file=out, width=200).print(picture(status))
    return out.getvalue()


def rows(status: GuardStatus) -> list[list[str]]:
    return [line.split() for line in shown(status).splitlines()]


def test_latencies_stand_beside_their_targets_with_the_share_that_kept_them() -> None:
    assert ["TTFT", "110", "ms", "300", "ms", "466", "ms", "750", "ms", "99.87%", "100", "ms"] in rows(STATUS)
    assert ["TPOT", "10.1", "ms", "20.0", "ms", "43.1", "ms", "40.0", "ms", "98.10%", "9.0", "ms"] in rows(STATUS)


def test_a_shared_device_shows_whose_turn_it_is_and_who_waits() -> None:
    trainers = tuple(
        Borrower(worker_id=run, state=state) for run, state in (("b", "its turn"), ("a", "waits"), ("c", "parked"))
    )
    turns = GuardStatus(mode="turns", state="held", waiting=1, borrowers=trainers)
    assert head(turns) == "shared device: the turn of run b, 1 waiting"
    assert ["b", "its", "turn"] in rows(turns)
    assert ["c", "parked"] in rows(turns)
    assert list(lines(turns)) == [head(turns), "b its turn", "a waits", "c parked"]
    assert "harvested" not in shown(turns)
    assert head(replace(turns, state="free", borrowers=(), waiting=0)) == "shared device: free, 0 waiting"


def test_models_with_an_slo_of_their_own_have_their_own_lines() -> None:
    own = ModelLatency(model="big", ttft=Latency(p50=0.2), tpot=Latency(p99=0.5, target=0.4, attained=0.9))
    several = replace(STATUS, models=(own, ModelLatency()))
    assert ["TTFT", "big", "200", "ms", "-", "-", "learning", "-", "-"] in rows(several)
    assert ["TPOT", "others", "-", "-", "-", "learning", "-", "-"] in rows(several)
    assert "TPOT big p99 500 ms of 400 ms, 90.00% attained" in next(lines(several))


def test_a_target_that_is_not_known_yet_is_being_learnt() -> None:
    learning = replace(STATUS, ttft=Latency(p50=0.1))
    assert ["TTFT", "100", "ms", "-", "-", "learning", "-", "-"] in rows(learning)


def test_each_borrower_tells_what_it_harvested_and_how_fast_it_gave_the_engine_back() -> None:
    (row,) = [" ".join(line) for line in rows(STATUS) if line[:1] == ["w1"]]
    harvest = "w1 granted 32 3,344 1,234,567 345.7 s 64 MB 256 MB normal host"
    assert row == f"{harvest} 1,042 6.1 ms 18.4 ms 1 77"


def test_load_slack_and_the_next_steps_budget_are_told() -> None:
    told = shown(STATUS)
    assert "chat: shared, 3 in flight (1 wait), load 35%, 1 borrower at 3,344 tokens/s" in told
    assert "96 tokens of 24 rollouts" in told
    assert "12.3 ms" in told
    assert "5,306 in 1:00:05, 2 failed" in told
    assert "serving has 300 MB of the pair's 1 GB" in told
    assert "1,234,567 tokens in 345.7 GPU-seconds" in told
    assert "62% of the next minute; this lasts 8.2 s" in told


def test_the_small_picture_has_latencies_and_what_is_granted_and_fits_below_another() -> None:
    out = io.StringIO()
    Console(file=out, width=100).print(small_picture(STATUS))
    told = out.getvalue()
    assert told.splitlines()[0] == head(STATUS)
    assert "slack: 12.3 ms · next step: 96 tokens of 24 rollouts · harvested: 1,234,567 tokens" in told
    assert len(told.splitlines()) <= 6


def test_without_requests_and_borrowers_it_says_so() -> None:
    told = shown(GuardStatus(state="idle"))
    assert "no borrower" in told
    assert "no request is in flight" in told
    assert "none" in told
    assert "memory" not in told


@pytest.mark.parametrize("state", ["settling", "held", "lent", "abandoned"])
def test_a_trainers_device_is_shown_by_who_has_it_and_without_what_only_served_engines_have(state: str) -> None:
    device = GuardStatus(mode="trainer", state=state, borrowers=(BUSY,), forecast=Forecast(share=0.62, spell_s=8.25))
    told = shown(device)
    assert f"trainer's device: {state}, 1 borrower at 3,344 tokens/s" in told
    assert f"{state}: " in told.replace("trainer's device: ", ""), "the state is explained"
    assert "1,234,567 tokens in 345.7 GPU-seconds" in told
    for text in (told, next(lines(device))):
        for word in ("TTFT", "slack", "in flight", "budget", "next step", "served model"):
            assert word not in text, word


def test_where_there_is_no_terminal_a_line_tells_the_whole_and_one_each_borrower() -> None:
    whole, one = lines(STATUS)
    assert whole.startswith(head(STATUS))
    assert "TTFT p99 466 ms of 750 ms, 99.87% attained" in whole
    assert "budget 96 tokens of 24 rollouts" in whole
    assert "w1 granted; rollouts 32; tokens/s 3,344; harvested 1,234,567" in one


def test_names_that_a_terminal_might_obey_do_not_reach_it() -> None:
    evil = replace(STATUS, model="\x1b[2J", borrowers=(replace(BUSY, worker_id="[red]w\x1b[0m"),))
    assert "\x1b" not in shown(evil)
    assert "\x1b" not in "".join(lines(evil))


def test_programs_get_the_record_as_it_is() -> None:
    told = json.loads(to_json(STATUS))
    assert told["ttft"]["p99"] == 0.466
    assert told["borrowers"][0]["residency"] == "host"
    assert told["borrowers"][0]["tokens_harvested"] == 1_234_567
