"""The simulator's benchmark: what it reads from real runs, what it fits to, and what becomes of its figures."""

import asyncio
import json
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from benchmarks.pair.traffic import Speeds
from benchmarks.simulator import __main__ as benchmark
from benchmarks.simulator import core_slices, parts
from benchmarks.simulator.comparison import compare_setting, over_interruptions
from benchmarks.simulator.fitting_inputs import cluster_delays, learned_steps, step_intervals
from benchmarks.simulator.interrupting import RunWatch
from benchmarks.simulator.measured import (
    Measured,
    MeasuredInterruption,
    MeasuredTokens,
    handed_over,
    measured_responses,
    measured_steps,
    measured_tokens,
    resumes,
)
from benchmarks.simulator.parts import FIGURES, PartOptions, PartResult
from benchmarks.simulator.profile_block import EngineBlock, FirstTokens, GridCell, decode_windows
from benchmarks.simulator.random_reward import RandomRewardSource
from benchmarks.simulator.real_settings import ProfileBlock, RealSession, chosen, read_session
from benchmarks.simulator.served_pool import granted, pair_costs, users_record
from benchmarks.simulator.served_users import UsersRecord
from benchmarks.simulator.setting import QUICK, QUICK_STEPS, SETTINGS, STEPS, RealSetting
from benchmarks.simulator.simulated_side import SessionSimulator
from ebbtide.client import Client
from ebbtide.client.client import read_spec
from ebbtide.demo.coserving.coserving_records import ServedAnswer
from ebbtide.demo.coserving.request_traffic import TrafficRequest
from ebbtide.demo.token_accounts import LedgerAttempt
from ebbtide.errors import EbbtideError, InvalidRequest
from ebbtide.simulator.engines.engine_profile import EngineProfile, KvCapacity, StepCosts
from ebbtide.simulator.outcome import Outcome, StepOutcome, TokenCounts
from ebbtide.simulator.recording.run_recorder import installs
from ebbtide.types.fleet import EndCause
from ebbtide.types.run import AttemptSpan, RunEvent, check_spec

SETTING = RealSetting(name="two steps", workers=2, steps=2, prompts=1, group=2)


def version(step: int, at_s: float) -> RunEvent:
    return RunEvent(kind="version", values={"version": step + 1.0, "step": float(step)}, age_s=at_s)


def trained(step: int, at_s: float) -> RunEvent:
    values = {"step": step + 1.0, "seconds_wait": 4.0, "seconds_train": 2.0, "publish_seconds": 0.5, "reward": 0.3}
    return RunEvent(kind="step", values=values, age_s=at_s)


def span(name: str, worker: str, first: int, last: int, begin_s: float, end_s: float, cause: EndCause) -> AttemptSpan:
    return AttemptSpan(
        cursor="", rollout_id=name, attempt_id=f"{name}/{worker}", worker_id=worker, first=first, last=last,
        begin_s=begin_s, end_s=end_s, end="", cause=cause,
    )  # fmt: skip


#: Two steps; in the second one w1 is killed with 40 stored tokens of a rollout, which goes on at w2.
EVENTS = [version(0, 1.0), version(1, 8.0), trained(0, 8.1), version(2, 17.0), trained(1, 17.1)]
SPANS = [
    span("s0.g0.0.t0", "w1", 0, 30, 1.5, 3.0, EndCause.FINISHED),
    span("s0.g0.1.t0", "w2", 0, 50, 1.6, 5.0, EndCause.FINISHED),
    span("s1.g0.0.t0", "w1", 0, 40, 8.5, 10.2, EndCause.WORKER_LOST),
    span("s1.g0.0.t0", "w2", 40, 100, 10.3, 14.0, EndCause.FINISHED),
    span("s1.g0.1.t0", "w2", 0, 20, 8.6, 9.5, EndCause.FINISHED),
]
KILL = MeasuredInterruption(kind="kill", worker="w1", step=1, after_s=2.0, gone_s=0.05, back_s=3.1)


def measured(setting: RealSetting = SETTING, twice: int = 6, moved: int = 40) -> Measured:
    return Measured(
        setting=setting,
        steps=measured_steps(EVENTS, SPANS),
        responses=measured_responses(SPANS),
        interruptions=[KILL],
        installs=[],
        tokens=MeasuredTokens(generated=206, kept=200, twice=twice, moved=moved),
        resumes=1,
    )


def outcome(trained_s: list[float], twice: int = 0, moved: int = 0) -> Outcome:
    steps = [
        StepOutcome(run="r", step=step, opened_s=0.0, generated_s=at, trained_s=at, rollouts=2, tokens=100, tail_s=0.0)
        for step, at in enumerate(trained_s)
    ]
    tokens = TokenCounts(twice=twice, moved=moved)
    return Outcome(scenario="s", seed=0, simulated_s=20.0, steps=steps, pools=[], tokens=tokens)


def test_a_step_lasts_from_one_announcement_to_the_next() -> None:
    first, second = measured_steps(EVENTS, SPANS)
    assert (first.opened_s, first.first_s, first.generated_s, first.announced_s) == (1.0, 1.5, 5.0, 8.0)
    assert (first.tokens, first.seconds) == (80, 7.0)
    assert first.trainer == {"seconds_wait": 4.0, "seconds_train": 2.0, "publish_seconds": 0.5}
    assert (second.tokens, second.seconds) == (120, 9.0)


def test_a_step_without_a_version_of_its_own_is_left_out() -> None:
    assert [step.step for step in measured_steps(EVENTS[:3], SPANS)] == [0]


def test_each_response_counts_once_with_its_whole_length() -> None:
    found = [(one.step, one.prompt, one.sample, one.tokens) for one in measured_responses(SPANS)]
    assert found == [(0, 0, 0, 30), (0, 0, 1, 50), (1, 0, 0, 100), (1, 0, 1, 20)]
    assert resumes(SPANS) == 1


def test_tokens_after_the_stored_ones_were_regenerated_and_the_stored_ones_moved() -> None:
    attempts = {"s1.g0.0.t0": [LedgerAttempt("w1", 0, 46), LedgerAttempt("w2", 40, 60)]}
    found = measured_tokens(attempts, SPANS, {"w1"})
    assert found == MeasuredTokens(generated=106, kept=200, twice=6, moved=40)


def test_an_interruption_tells_when_its_rollouts_were_free() -> None:
    (found,) = handed_over([KILL], measured_steps(EVENTS, SPANS), SPANS)
    assert found.handed_s == pytest.approx(10.2 - 8.0 - 2.0)


def test_installs_are_read_from_events() -> None:
    values = {"version": 2.0, "pull_s": 0.1, "pause_s": 0.2}
    (found,) = installs([RunEvent(kind="installed", values=values, labels={"worker": "w1"}, age_s=3.0)])
    assert (found.worker, found.version, found.at_s, found.pull_s, found.pause_s) == ("w1", 2, 3.0, 0.1, 0.2)


def test_the_error_is_that_of_the_median_step_behind_the_first_one() -> None:
    found = compare_setting(measured(), outcome([6.0, 16.8], twice=7, moved=44))
    assert found.real.median == 9.0
    assert found.simulated.median == pytest.approx(10.8)
    assert found.error == pytest.approx(0.2)
    assert (found.twice, found.moved, found.interruptions) == ((6, 7), (40, 44), 1)


@pytest.mark.parametrize("ends", [[], [6.0], [6.0, 16.8, 20.0]])
def test_other_numbers_of_steps_are_not_compared(ends: list[float]) -> None:
    with pytest.raises(ValueError, match="two steps"):
        compare_setting(measured(), outcome(ends))


def test_tokens_are_summed_over_settings_with_kills_and_drains() -> None:
    one = compare_setting(measured(), outcome([6.0, 16.8], twice=8, moved=30))
    calm = msgspec.structs.replace(one, interruptions=0, twice=(50, 0))
    found = over_interruptions([one, one, calm])
    assert (found.interruptions, found.twice, found.moved) == (2, (12, 16), (80, 60))
    assert found.twice_error == pytest.approx(1 / 3)
    assert found.moved_error == pytest.approx(0.25)


def test_a_sum_of_nothing_has_no_error() -> None:
    assert over_interruptions([]).twice_error is None


def test_windows_of_steps_begin_when_all_decode_and_end_before_one_has_finished() -> None:
    cell = GridCell(concurrency=2, prompt=10, length=60)
    looks = [(0.0, ()), (0.1, (1,)), *((0.2 + 0.01 * step, (1 + step, 1 + step)) for step in range(60))]
    windows = decode_windows(cell, looks)
    assert [round(one.steps) for one in windows] == [24, 24]
    assert all(one.seconds / one.steps == pytest.approx(0.01) for one in windows)
    assert windows[0].context == pytest.approx(2 * 10 + (2 + 50) / 2)


def test_reading_is_what_long_prompts_take_beyond_a_short_one() -> None:
    firsts = [
        FirstTokens(concurrency=1, prompt=24, first_s=0.05, all_s=0.05),
        FirstTokens(concurrency=4, prompt=256, first_s=0.1, all_s=0.55),
    ]
    block = EngineBlock(at_s=0.0, whole_core=False, windows=[], firsts=firsts)
    (found,) = step_intervals([block], whole_core=False)
    assert found.prefill == 4 * 256 - 24
    assert found.seconds == pytest.approx(0.5)
    assert step_intervals([block], whole_core=True) == []


def test_the_trainer_is_fitted_to_steps_behind_each_runs_first() -> None:
    firsts = [FirstTokens(concurrency=1, prompt=24, first_s=0.05, all_s=0.05)]
    install = installs(
        [RunEvent(kind="installed", values={"version": 2.0, "pull_s": 0.1, "pause_s": 0.2}, labels={"worker": "w1"})]
    )
    run = msgspec.structs.replace(measured(), installs=install)
    engine = EngineBlock(at_s=0.0, whole_core=False, windows=[], firsts=firsts)
    block = ProfileBlock(engine=engine, trained=[run])
    (step,) = learned_steps([block])
    assert (step.seconds, step.lengths) == (2.0, [48 + 100, 48 + 20])
    delays = cluster_delays([block])
    assert delays.place_s == pytest.approx(0.5)
    assert delays.notice_s == pytest.approx(3.0 - 2.0 - 0.5)
    with pytest.raises(ValueError, match="no trained steps"):
        cluster_delays([ProfileBlock(engine=engine)])


async def test_a_run_that_ends_early_is_not_waited_for() -> None:
    async def watch(_: str) -> AsyncIterator[RunEvent]:
        for event in EVENTS:
            yield event

    found = RunWatch()
    waiting = asyncio.create_task(found.opened(5))
    await found.follow(cast("Client", SimpleNamespace(watch=watch)), "run")
    with pytest.raises(EbbtideError, match="before its step 5"):
        await waiting
    assert found.events == EVENTS
    assert found.usual_wait_s == 4.0
    assert await found.opened(1) >= await found.opened(0)


def test_all_settings_together_kill_and_drain_twenty_workers() -> None:
    kinds = [one.kind for setting in SETTINGS for one in setting.interruptions]
    assert kinds.count("kill") + kinds.count("drain") >= 20
    assert all(setting.steps == STEPS for setting in SETTINGS)
    assert [setting.steps for setting in QUICK] == [QUICK_STEPS, QUICK_STEPS]
    assert all(0 < one.step < setting.steps for setting in (*SETTINGS, *QUICK) for one in setting.interruptions)


def test_each_setting_is_a_run_that_the_cluster_accepts() -> None:
    for setting in (*SETTINGS, *QUICK):
        spec = check_spec(read_spec(setting.spec("/model", "/output", 0)))
        assert spec.trainer.steps == setting.steps


def test_settings_are_chosen_by_name_and_shortened() -> None:
    (found,) = chosen(quick=False, names=["kills"], steps=5)
    assert (found.name, found.steps) == ("kills", 5)
    assert [one.step for one in found.interruptions] == [2, 3]
    with pytest.raises(ValueError, match="no such setting; there are"):
        chosen(quick=True, names=["kills"], steps=None)


def test_rewards_follow_from_prompt_and_response_alone() -> None:
    source = RandomRewardSource({"prompt_tokens": 32}, seed=1)
    one, same, other = source.make("train", 3), source.make("train", 3), source.make("train", 4)
    assert one.reset() == same.reset() != other.reset()
    assert len(one.reset()[0].content) == 30
    assert one.step("abc") == same.step("abc")
    assert one.step("abc").reward != one.step("abd").reward
    with pytest.raises(InvalidRequest) as refused:
        RandomRewardSource({"prompt_tokens": 2}, seed=1)
    assert refused.value.field == "environment.params.prompt_tokens"


def test_an_engine_runs_in_its_own_turn_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    runs, seen = {1: True, 2: True}, list[dict[int, bool]]()

    def kill(pid: int, number: int) -> None:
        if pid not in runs:
            raise ProcessLookupError
        runs[pid] = number == signal.SIGCONT

    monkeypatch.setattr(core_slices, "os", SimpleNamespace(kill=kill))
    clock = SimpleNamespace(monotonic=lambda: 0.0, sleep=lambda _: seen.append(dict(runs)))
    monkeypatch.setattr(core_slices, "time", clock)
    slices = core_slices.CoreSlices(3)
    slices.assign({0: (1,), 1: (3,), 2: (2,)})  # 3 was killed
    for turn in range(3):
        slices.take(turn)
    assert seen == [{1: True, 2: False}, {1: False, 2: False}, {1: False, 2: True}]
    slices.assign({})
    assert runs == {1: True, 2: True}


def test_a_turn_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="turns are 0 to 2"):
        core_slices.CoreSlices(3).assign({3: ()})


def run(tmp_path: Path, *words: str) -> tuple[int, dict[str, Any]]:
    out = tmp_path / "simulator.json"
    status = benchmark.main([*words, "--out", str(out)])
    return status, json.loads(out.read_text())


def test_a_part_that_fails_leaves_its_figures_null_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def brings(options: PartOptions) -> PartResult:
        assert options.quick
        return PartResult(figures={"error_vs_published_median": 0.05}, details={"points": 20})

    async def fails(_: PartOptions) -> PartResult:
        raise RuntimeError("no engine boots here")

    for name, part in (("published", brings), ("real", fails)):
        monkeypatch.setitem(parts.PARTS, name, part)
    status, told = run(tmp_path, "--quick", "--parts", "real", "published")
    assert status == 1
    assert told["figures"].keys() == {name for names in FIGURES.values() for name in names}
    assert {name: value for name, value in told["figures"].items() if value is not None} == {
        "error_vs_published_median": 0.05
    }
    assert told["failed"] == {"real": "RuntimeError: no engine boots here"}
    assert told["missing"]["error_vs_real_worst"] == "part real failed"
    assert told["missing"]["day_of_32_workers_s"] == "part speed was not asked for"
    assert told["missing"]["error_vs_published_worst"] == "part published brought none"


def test_a_kept_session_is_judged_without_another_measurement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session = RealSession(seed=3, quick=True, conditions={"cores": 2}, settings=[measured()])
    path = tmp_path / "session.json"
    path.write_bytes(msgspec.json.encode(session))
    assert read_session(path) == session
    monkeypatch.setattr(SessionSimulator, "setting", lambda *_: outcome([6.0, 15.9], twice=6, moved=40))
    status, told = run(tmp_path, "--quick", "--parts", "real", "--measured", str(path))
    assert status == 0
    assert told["figures"]["error_vs_real_worst"] == pytest.approx(0.1)
    assert told["parts"]["real"]["interruptions"]["twice_error"] == 0.0
    assert told["parts"]["real"]["enough_interruptions"] is False


def test_a_setting_that_cannot_be_simulated_leaves_no_figure_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = msgspec.structs.replace(SETTING, name="beyond it")
    session = RealSession(seed=3, quick=True, conditions={}, settings=[measured(), measured(other)])
    path = tmp_path / "session.json"
    path.write_bytes(msgspec.json.encode(session))

    def simulated(_: SessionSimulator, one: Measured) -> Outcome:
        if one.setting.name == "beyond it":
            raise ValueError("too few steps")
        return outcome([6.0, 15.9])

    monkeypatch.setattr(SessionSimulator, "setting", simulated)
    status, told = run(tmp_path, "--parts", "real", "--measured", str(path))
    assert status == 1
    assert told["failed"] == {"real": "beyond it: too few steps"}
    assert told["figures"]["error_vs_real_median"] is None
    assert [one["setting"] for one in told["parts"]["real"]["settings"]] == ["two steps"]


def test_a_session_that_is_not_there_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        benchmark.parse(["--measured", str(tmp_path / "none.json")])
    assert "real_settings writes one" in capsys.readouterr().err


def test_users_beside_a_borrowed_worker_leave_it_what_a_pair_with_their_costs_does() -> None:
    requests = [TrafficRequest(at=0.4 * number, prompt=100 + number, output=8) for number in range(30)]
    alone = [
        ServedAnswer(
            due=one.at,
            sent=one.at,
            first=one.at + 0.01 + 0.001 * one.prompt,
            last=one.at + 0.08 + 0.001 * one.prompt,
            prompt=one.prompt,
            output=one.output,
        )
        for one in requests
    ]
    speeds = Speeds(fixed_s=0.01, prompt_s=0.001, token_s=0.01)
    users = UsersRecord(requests=requests, window_s=12.0, speeds=speeds, ttft_s=0.5, tpot_s=0.05, alone=alone)
    served = msgspec.structs.replace(measured(), served=msgspec.to_builtins(users))
    assert users_record(served) == users
    costs = StepCosts(base_s=0.004, context_s=1e-6)
    engine = EngineProfile(name="e", model="m", device="d", gpus=0, source="s", costs=costs, kv=KvCapacity(tokens=4096))
    pair = pair_costs(users, engine, 200.0)
    assert (pair.step_s, pair.step_token_s) == pytest.approx((0.004, 2e-4))
    assert pair.prefill_token_s == pytest.approx(0.001, rel=0.1)
    assert pair.decode(1) == pytest.approx(0.01, rel=0.1)
    tape = granted(users, engine, 200.0)
    assert tape.end_s == 12.0
    assert 0.0 < tape.granted_share <= 1.0
    with pytest.raises(InvalidRequest, match="has no users"):
        users_record(measured())
