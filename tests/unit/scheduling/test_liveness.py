"""Who is silent, and which attempts were in vain."""

from typing import Any

import pytest

from ebbtide.scheduling.attempts import blames, dead_letter
from ebbtide.scheduling.liveness import Liveness


def judged(liveness: Any, until: Any, step: Any = 0.5, start: Any = 0.0) -> Any:
    """Sessions found silent while judging from `start` on, with when."""
    found: dict[str, float] = {}
    now = start
    while now <= until:
        for session in liveness.silent(now):
            found.setdefault(session, now)
        now += step
    return found


def test_a_silent_worker_is_found_soon_after_the_timeout() -> None:
    liveness = Liveness(5.0)
    liveness.heard("a", 0.0)
    assert judged(liveness, 5.0) == {}
    assert judged(liveness, 6.0, start=5.5) == {"a": 5.5}


def test_a_worker_heard_in_time_is_never_silent() -> None:
    liveness = Liveness(5.0)
    for now in range(60):
        liveness.heard("a", float(now))
        assert liveness.silent(now + 0.5) == []


def test_the_judges_own_sleep_counts_against_nobody() -> None:
    liveness = Liveness(5.0)
    liveness.heard("a", 0.0)
    assert judged(liveness, 2.0) == {}
    assert liveness.silent(32.0) == []  # asleep for 30 s
    assert judged(liveness, 34.5, start=32.5) == {}
    assert judged(liveness, 40.0, start=35.0) == {"a": 35.5}  # 5 s of wakefulness since it was heard


def test_a_forgotten_session_is_never_silent() -> None:
    liveness = Liveness(1.0)
    liveness.heard("a", 0.0)
    assert liveness.since("a", 0.5) == 0.5
    liveness.forget("a")
    assert judged(liveness, 10.0) == {}
    assert liveness.since("a", 10.0) == 0.0


@pytest.mark.parametrize(
    "reason", ["", "draining", "Drain: SIGTERM", "preempted", "reclaimed by the guard", "shutdown"]
)
def test_leaving_blames_no_rollout(reason: Any) -> None:
    assert not blames(reason)


@pytest.mark.parametrize("reason", ["stopped: the engine died", "refused: prompt"])
def test_a_failure_may_be_the_rollouts(reason: Any) -> None:
    assert blames(reason)


def test_a_dead_letter_says_how_often_and_why() -> None:
    assert dead_letter(4, "x; ", limit=5) is None
    message = dead_letter(5, "attempt on w1 at token 0: engine error; ", limit=5)
    assert message == "5 attempts in a row ended without a new token: attempt on w1 at token 0: engine error"
