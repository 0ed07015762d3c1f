"""What a person is told of one run's rollouts and tokens."""

import io
import math

import msgspec
from rich.console import Console

from ebbtide.cli.views.run import Histogram, detail_table, finite, histogram
from ebbtide.types.run import EnvironmentSpec, Run, RunMoves, RunShare, RunSpec, RunStatus, ShareSpec
from ebbtide.types.weights import PolicyVersion

SPEC = RunSpec(name="demo", model="m", environment=EnvironmentSpec(name="e"))
COUNTERS = {
    "submitted": 100, "trained": 90, "queued": 2, "running": 5, "finished": 1, "attempts": 123, "moved": 4,
    "resumed_midway": 17, "tokens_stored": 54321, "tokens_resumed": 2222, "tokens_lost_at_most": 64,
    "attempts:le:1": 80, "attempts:le:2": 8, "attempts:le:3": 1, "attempts:le:5": 1, "detection:le:0.1": 1,
    "detection:le:2.5": 98, "detection:le:3": 1, "resume:le:0.5": 3, "resume:le:inf": 1,
}  # fmt: skip


def told(run: Run) -> str:
    out = io.StringIO()
    Console(file=out, width=160).print(detail_table(run))
    return out.getvalue()


def test_a_percentile_is_the_bound_that_it_does_not_exceed() -> None:
    found = histogram(COUNTERS, "detection")
    assert (found.count, found.at_most(0.01), found.at_most(0.5), found.at_most(0.99)) == (100, 0.1, 2.5, 2.5)
    assert found.at_most(0.999) == 3
    assert histogram({}, "detection").at_most(0.5) is None


def test_a_percentile_beyond_the_last_bound_is_no_number() -> None:
    assert histogram(COUNTERS, "resume").at_most(0.99) == math.inf
    assert finite(histogram(COUNTERS, "resume").at_most(0.99)) is None
    assert finite(Histogram(((0.5, 1),)).at_most(0.5)) == 0.5


def test_a_run_tells_what_was_saved_lost_migrated_and_how_fast() -> None:
    newest = PolicyVersion(policy="policy", version=7, step=6)
    run = Run(
        run_id="r", spec=SPEC, status=RunStatus.RUNNING, counters=COUNTERS, dropped={"cancelled": 3}, newest=newest,
        holders={"trainer": "t-1"}, message="waits for workers: none is attached", age_s=61,
    )  # fmt: skip
    text = told(run)
    for said in (
        "r, running after 1:01", "waits for workers: none is attached", "version 7, step 6 of 100",
        "100 submitted, 90 trained; dropped: 3 cancelled", "2 wait, 5 run, 1 finished",
        "123; of finished rollouts 80 had 1, 8 had 2, 1 had 3, 1 had 4-5",
        "17 resumed midway; 4 moved", "2,222 tokens that were not generated again", "at most 64 tokens",
        "p50 ≤ 2.5 s, p90 ≤ 2.5 s, p99 ≤ 2.5 s (100 observed", "p50 ≤ 0.5 s, p90 > the largest bucket", "t-1",
    ):  # fmt: skip
        assert said in text, text


def test_a_run_tells_what_moves_of_running_rollouts_promised_and_what_came_of_them() -> None:
    moves = RunMoves(moves=30, finished=120, judged=20, promised_tokens=20_000.0, made_tokens=18_500.0)
    text = told(Run(run_id="r", spec=SPEC, moves=moves))
    assert "30 running rollouts moved, 0.25 for each finished one; 20 judged: 18,500 tokens made of 20,000" in text
    assert "stopped" not in text
    assert "stopped, as that is too little" in told(Run(run_id="r", spec=SPEC, moves=RunMoves(moves=9, stopped=True)))
    assert "balanced" not in told(Run(run_id="r", spec=SPEC, moves=RunMoves()))


def test_a_run_without_losses_shows_no_latencies() -> None:
    text = told(Run(run_id="r", spec=SPEC))
    assert "detection" not in text
    assert "at most 0 tokens" in text


def test_a_live_run_tells_its_share_and_what_bounds_it_and_one_that_ended_the_bounds_alone() -> None:
    spec = msgspec.structs.replace(SPEC, share=ShareSpec(weight=2.0, floor=0.1, ceiling=0.5, priority=3))
    bounds = "weight 2, priority 3, floor 10%, ceiling 50%"
    live = told(Run(run_id="r", spec=spec, share=RunShare(lately=0.421, due=0.5, workers=3)))
    assert f"42.1% of the tokens lately, 50.0% due, 3 workers ({bounds})" in live
    ended = told(Run(run_id="r", spec=spec, status=RunStatus.FINISHED))
    assert bounds in ended
    assert "lately" not in ended


def test_a_run_whose_scorings_were_cut_tells_how_many() -> None:
    text = told(Run(run_id="r", spec=SPEC, counters={"rewards_out_of_time": 1234}))
    assert "1,234 reward computations cut by tail.reward_timeout_s" in text
    assert "reward_timeout_s" not in told(Run(run_id="r", spec=SPEC))


def test_a_run_that_served_requests_tells_of_them_and_of_sessions() -> None:
    counters = {"requests_submitted": 1200, "requests_completed": 1100, "sessions_opened": 9, "sessions_completed": 4}
    text = told(Run(run_id="r", spec=SPEC, counters=counters))
    assert "1,200 submitted, 1,100 ended" in text
    assert "9 opened, 4 became trajectories, 0 dropped" in text
    assert "sessions" not in told(Run(run_id="r", spec=SPEC))
