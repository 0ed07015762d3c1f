"""What switches of a device cost, counted from made-up ledgers, timelines and logs: each fault is found."""

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest

from benchmarks.elastic.switches.device_watch import DeviceWatch
from benchmarks.elastic.switches.switch_accounts import findings, read_switches
from benchmarks.elastic.switches.switch_run import MAX_TOKENS, RUN, ProgramKill, SwitchedRun
from ebbtide.ledger import Ledger
from ebbtide.types.fleet import AttemptRef, EndCause
from ebbtide.types.run import AttemptSpan, EnvironmentSpec, Run, RunEvent, RunSpec, RunStatus, TrainerSpec

_HALF = MAX_TOKENS // 2
_AT = 1_000_000.0


def attempt(number: int, first: int, last: int, cause: EndCause, *, rollout: str = "s0.g0.0") -> AttemptSpan:
    return AttemptSpan(
        cursor=str(number),
        rollout_id=rollout,
        attempt_id=f"a{number}",
        worker_id="w",
        first=first,
        last=last,
        begin_s=float(number),
        end_s=number + 0.5,
        end="",
        cause=cause,
    )


def back(at: float, *, steps: int = 1, step_s: float = 0.01) -> dict[str, object]:
    stamp = datetime.fromtimestamp(at, UTC).isoformat()
    times = {"compute_s": 0.008, "memory_s": 0.02, "step_s": step_s}
    return {"event": "device back", "timestamp": stamp, "steps": steps, **times}


class Found:
    """A run of one rollout and one step, cut once as planned."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.spans = [attempt(1, 0, _HALF, EndCause.MOVED), attempt(2, _HALF, MAX_TOKENS, EndCause.FINISHED)]
        self.made = {"a1": (0, _HALF), "a2": (_HALF, MAX_TOKENS - _HALF)}
        self.log = [back(_AT + at) for at in range(10)]
        self.kills: list[ProgramKill] = []
        self.staleness = 0.0
        self.trained = 1
        self.watch = DeviceWatch(folder, "w")

    def run(self) -> SwitchedRun:
        ledger, log = self._folder / "w.ledger", self._folder / "guard.log"
        with Ledger(ledger) as book:
            for name, (start, generated) in self.made.items():
                entry = book.open(AttemptRef(RUN, "s0.g0.0", name), start)
                book.add(entry, generated)
        log.write_text("\n".join(json.dumps(entry) for entry in [*self.log, {"event": "other"}]) + "\ntorn {")
        spec = RunSpec(
            name=RUN, model="m", environment=EnvironmentSpec(name="e"), trainer=TrainerSpec(steps=1, streaming=True)
        )
        counters = {"submitted": 1, "trained": self.trained}
        return SwitchedRun(
            run=Run(run_id=RUN, spec=spec, status=RunStatus.FINISHED, counters=counters),
            events=[RunEvent(kind="step", values={"step": 1.0, "staleness_max": self.staleness})],
            spans=self.spans,
            kills=self.kills,
            watch=self.watch,
            ledgers={"w": ledger},
            guard_log=log,
            took_s=1.0,
        )


@pytest.fixture
def found(tmp_path: Path) -> Found:
    return Found(tmp_path)


def test_a_planned_cut_that_costs_nothing_passes(found: Found) -> None:
    seen = findings(found.run())
    assert not list(seen.failures())
    assert (seen.planned_cuts, seen.cuts_without_notice, seen.tokens_twice, seen.switches) == (1, 0, 0, 10)
    assert seen.switch_steps_p99 == 1.0
    assert seen.switch_over_step_p99 == pytest.approx(0.8), "by the clock, in steps"


def test_a_token_that_is_regenerated_on_a_planned_cut_is_found(found: Found) -> None:
    found.made["a1"] = 0, _HALF + 1
    assert any("made twice without" in failure for failure in findings(found.run()).failures())


@pytest.mark.parametrize(("again", "passes"), [(32, True), (33, False)])
def test_a_cut_without_notice_may_cost_a_flush_window_and_no_more(found: Found, again: int, passes: bool) -> None:
    found.spans[0] = attempt(1, 0, _HALF, EndCause.WORKER_LOST)
    found.made["a1"] = 0, _HALF + again
    seen = findings(found.run())
    assert seen.cuts_without_notice == 1
    assert any("were made twice for a cut" in failure for failure in seen.failures()) is not passes


def test_a_run_in_which_nothing_was_cut_has_measured_nothing(found: Found) -> None:
    found.spans[:2] = [attempt(1, 0, MAX_TOKENS, EndCause.FINISHED)]
    assert any("nothing was measured" in failure for failure in findings(found.run()).failures())


def test_tokens_that_were_stored_and_are_made_again_are_lost_ones(found: Found) -> None:
    found.spans[1] = attempt(2, _HALF - 3, MAX_TOKENS, EndCause.FINISHED)
    assert findings(found.run()).tokens_lost == 3


def test_a_response_that_ends_too_early_has_lost_tokens(found: Found) -> None:
    found.spans[1] = attempt(2, _HALF, MAX_TOKENS - 5, EndCause.FINISHED)
    assert findings(found.run()).tokens_lost == 5


def test_a_mixed_step_and_a_device_with_two_users_or_none_are_found(found: Found) -> None:
    found.staleness = 1.0
    found.watch.both = [100.0]
    found.watch.unowned = [(_AT, _AT + 5.0)]
    assert len(list(findings(found.run()).failures())) == 3


def test_a_device_waits_for_the_successor_of_a_killed_guard(found: Found) -> None:
    found.kills = [ProgramKill("trainer-guard", _AT)]
    found.watch.unowned = [(_AT + 0.1, _AT + 5.0)]
    seen = findings(found.run())
    assert seen.unowned_s == 0.0
    assert seen.unowned_behind_kills_s == pytest.approx(4.9, abs=0.01)


def test_switches_beside_a_kill_are_not_timed(found: Found) -> None:
    found.log.append(back(_AT + 500.0, steps=90))
    found.kills = [ProgramKill("trainer", _AT + 499.0)]
    seen = findings(found.run())
    assert (seen.switches, seen.calm_switches) == (11, 10)
    assert seen.switch_steps_p99 == 1.0


def test_a_switch_before_which_the_engine_made_no_step_is_none(found: Found) -> None:
    found.log.append(back(_AT + 20.0, step_s=0.0))
    assert findings(found.run()).switches == 10
    assert len(read_switches(found.run().guard_log)) == 11


def test_a_run_whose_rollouts_are_not_all_accounted_for_is_refused(found: Found) -> None:
    found.trained = 0
    with pytest.raises(RuntimeError, match="did not end well"):
        findings(found.run())


def test_a_device_that_is_back_too_late_is_found(found: Found) -> None:
    found.log = [back(_AT + at, steps=3) for at in range(10)]
    assert any("3 steps of the engine" in failure for failure in findings(found.run()).failures())
