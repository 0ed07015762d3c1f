"""Arrivals out of a trace, and made-up ones."""

from itertools import pairwise
from pathlib import Path

import pytest

from ebbtide.demo.coserving.coserving_options import CoservingOptions, traffic
from ebbtide.demo.coserving.request_traffic import (
    TraceLengths,
    TrafficBursts,
    TrafficRequest,
    faster,
    laps,
    made_up,
    read_trace,
)
from ebbtide.errors import InvalidRequest

AS_THEY_ARE = TraceLengths(prompts=1.0, outputs=1.0)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.csv"
    path.write_text("t_s,input_tokens,output_tokens\n0.0,100,10\n10.0,400,40\n10.0,800,1\n12.5,9000,2000\n20.0,1,1\n")
    return path


def test_a_window_counts_from_its_start_and_leaves_its_end_out(trace: Path) -> None:
    assert read_trace(trace, (10.0, 20.0), AS_THEY_ARE) == [
        TrafficRequest(0.0, 400, 40),
        TrafficRequest(0.0, 800, 2),
        TrafficRequest(2.5, 4096, 512),
    ]


def test_lengths_are_scaled_by_the_stated_factors_and_stay_in_their_bounds(trace: Path) -> None:
    found = read_trace(
        trace, (0.0, 100.0), TraceLengths(prompts=0.5, outputs=0.1, longest_prompt=1000, longest_output=100)
    )
    assert [(one.prompt, one.output) for one in found] == [(50, 2), (200, 4), (400, 2), (1000, 100), (8, 2)]


def test_faster_keeps_together_what_came_together(trace: Path) -> None:
    found = faster(read_trace(trace, (0.0, 100.0), AS_THEY_ARE), 10.0)
    assert [one.at for one in found] == [0.0, 1.0, 1.0, 1.25, 2.0]


def test_laps_follow_one_another_by_the_windows_length() -> None:
    assert [one.at for one in laps([TrafficRequest(0.5, 8, 2), TrafficRequest(4.0, 8, 2)], 5.0, 2)] == [
        0.5,
        4.0,
        5.5,
        9.0,
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a,b\n1,2\n", "needs the columns t_s,input_tokens,output_tokens"),
        ("t_s,input_tokens,output_tokens\n0.0,x,1\n", "cannot be read as a trace"),
        ("t_s,input_tokens,output_tokens\n0.0,1\n", "cannot be read as a trace"),
        ("t_s,input_tokens,output_tokens\n50.0,1,1\n", "has no request from 0 to 10 s"),
    ],
)
def test_a_file_that_is_no_trace_is_named(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "other.csv"
    path.write_text(text)
    with pytest.raises(InvalidRequest, match=said) as refused:
        read_trace(path, (0.0, 10.0), AS_THEY_ARE)
    assert refused.value.field == str(path)


def test_made_up_traffic_is_the_same_for_the_same_seed_and_comes_in_bursts() -> None:
    bursts = TrafficBursts(size=6.0, apart_s=0.1, quiet_s=10.0, prompt=300, output=16)
    found = made_up(bursts, 3_000.0, 7)
    assert found == made_up(bursts, 3_000.0, 7) != made_up(bursts, 3_000.0, 8)
    gaps = [later.at - one.at for one, later in pairwise(found)]
    assert sum(gap > 1.0 for gap in gaps) == pytest.approx(len(found) / 6, rel=0.25)
    assert sorted(one.prompt for one in found)[len(found) // 2] == pytest.approx(300, rel=0.1)
    assert all(0 <= one.at < 3_000.0 and one.prompt >= 8 and one.output >= 2 for one in found)


def test_the_demo_says_what_it_replays_and_how(trace: Path) -> None:
    found = traffic(CoservingOptions(trace=trace, window="10:20", speed=2.0, prompts=1.0, outputs=0.5))
    assert found.seconds == 5.0
    assert [one.at for one in found.requests] == [0.0, 0.0, 1.25]
    assert found.what == "trace.csv, 10 to 20 s, prompts x 1, answers x 0.5, at 2 times its pace"
    assert "made up: bursts of" in traffic(CoservingOptions()).what
