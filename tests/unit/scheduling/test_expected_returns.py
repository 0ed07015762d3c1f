"""What comes back from environments counts as load by its chance."""

import pytest

from ebbtide.scheduling.dispatch.host_view import HostView
from ebbtide.scheduling.dispatch.placement import place
from ebbtide.scheduling.dispatch.rollout_queue import QueuedRollout
from ebbtide.scheduling.dispatch.turns.expected_returns import ExpectedReturns
from ebbtide.scheduling.steps.step_pacing import VersionBounds


def lived(*, turns: int, wait_s: float, turn_s: float, sessions: int = 60) -> tuple[ExpectedReturns, float]:
    """Sessions one after another, each with so many turns, on a worker `other`."""
    returns, now = ExpectedReturns(), 0.0
    for session in range(sessions):
        for at in range(turns):
            now += turn_s
            returns.ended(f"e{session}", "other", turn_s=turn_s, now=now)
            if at + 1 < turns:
                now += wait_s
                returns.queued(f"e{session}", now)
        returns.forget(f"e{session}")
    return returns, now


def test_sessions_of_one_turn_come_back_nowhere() -> None:
    returns, now = lived(turns=1, wait_s=0.0, turn_s=10.0)
    returns.ended("new", "w", turn_s=10.0, now=now)
    assert returns.beside("w") == 0.0


@pytest.mark.parametrize(("wait_s", "share"), [(0.01, 1.0), (10.0, 0.37), (100.0, 0.05)])
def test_the_sooner_answers_come_the_more_a_waiting_session_counts(wait_s: float, share: float) -> None:
    returns, now = lived(turns=50, wait_s=wait_s, turn_s=10.0)
    for number in range(4):
        returns.ended(f"n{number}", "w", turn_s=10.0, now=now)
    assert returns.beside("w") == pytest.approx(4 * share * 49 / 50, rel=0.1)
    returns.queued("n0", now + 0.01)
    returns.forget("n1")
    assert returns.beside("w") == pytest.approx(2 * share * 49 / 50, rel=0.1)
    assert returns.beside("other") == 0.0


def test_an_answer_that_is_long_overdue_is_expected_no_more() -> None:
    returns, now = lived(turns=10, wait_s=4.0, turn_s=10.0)
    returns.ended("old", "w", turn_s=10.0, now=now)
    returns.ended("young", "x", turn_s=10.0, now=now + 19.0)
    assert returns.beside("w") > 0.0
    returns.ended("young", "x", turn_s=10.0, now=now + 21.0)
    assert returns.beside("w") == 0.0
    assert returns.beside("x") > 0.0


def test_a_new_session_begins_where_fewer_come_back() -> None:
    hosts = [
        HostView(worker_id=name, slots=32, running=8, installed=1, target=1, max_model_len=1_000, rate=rate)
        for name, rate in (("a", 30.0), ("b", 30.0), ("slow", 10.0))
    ]
    one = QueuedRollout(rollout_id="r", episode_id="e", bounds=VersionBounds(0, 0), length=10, place=0)
    coming = {"a": 3.0, "b": 2.0, "slow": 0.0}
    assert place([one], hosts, {}, returning=lambda name: coming[name]) == [("r", "b")]
