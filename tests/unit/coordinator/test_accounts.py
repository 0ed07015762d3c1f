"""Laws of who is owed what, of what runs are believed to want, and of what changes are known to take."""

import pytest

from ebbtide.coordinator.rules.fair_share import (
    CHANGE_S,
    ChangeoverTimes,
    RunDue,
    ShareAccounts,
    WorkerDemand,
)


def test_what_one_run_got_too_much_the_others_are_owed() -> None:
    accounts = ShareAccounts(0.0)
    due = {"a": RunDue(0.25, True), "b": RunDue(0.75, True)}
    accounts.tick({"a": 100, "b": 100}, due, workers=2, resting=0, turn_s=2.0, now=1.0)
    assert accounts.rate == pytest.approx(100.0)
    assert accounts.owed_s("a") == pytest.approx(-0.5)
    assert accounts.owed_s("b") == pytest.approx(0.5)
    accounts.tick({"b": 200}, due, workers=2, resting=0, turn_s=2.0, now=2.0)
    assert accounts.owed_s("a") == pytest.approx(-accounts.owed_s("b"), abs=1e-6)
    assert accounts.owed_s("b") == pytest.approx(0.0, abs=0.01)


def test_what_is_owed_has_a_bound_and_is_forgotten_without_work() -> None:
    accounts, due = ShareAccounts(0.0), {"a": RunDue(0.5, True), "b": RunDue(0.5, True)}
    for second in range(1, 200):
        accounts.tick({"b": 100}, due, workers=1, resting=0, turn_s=2.0, now=float(second))
    assert accounts.owed_s("a") == pytest.approx(16.0)
    for second in range(200, 220):
        accounts.tick({"b": 100}, {"b": RunDue(1.0, True)}, workers=1, resting=0, turn_s=2.0, now=float(second))
    assert 0.0 <= accounts.owed_s("a") < 0.5


def test_a_run_for_which_nothing_waits_is_owed_next_to_nothing() -> None:
    accounts, due = ShareAccounts(0.0), {"few": RunDue(0.5, False), "many": RunDue(0.5, True)}
    for second in range(1, 60):
        accounts.tick({"few": 10, "many": 90}, due, workers=1, resting=0, turn_s=2.0, now=float(second))
    assert accounts.owed_s("few") <= 1.0 + 1e-6
    assert accounts.owed_s("many") >= -1.5


def test_the_share_lately_is_of_the_last_half_minute_or_so() -> None:
    accounts = ShareAccounts(0.0)
    for second in range(1, 301):
        made = {"a": 30, "b": 10} if second <= 150 else {"a": 10, "b": 30}
        accounts.tick(made, {}, workers=1, resting=0, turn_s=2.0, now=float(second))
    assert accounts.lately("a") == pytest.approx(0.25, abs=0.02)
    assert accounts.lately("b") == pytest.approx(0.75, abs=0.02)
    assert accounts.lately("unknown") == 0.0


def test_nothing_is_owed_before_a_token_was_made() -> None:
    accounts = ShareAccounts(0.0)
    accounts.tick({}, {"a": RunDue(1.0, True)}, workers=1, resting=0, turn_s=2.0, now=1.0)
    assert accounts.owed_s("a") == accounts.lately("a") == accounts.rate == 0.0


def test_more_is_believed_at_once_and_less_with_patience() -> None:
    wants = WorkerDemand()
    assert wants.believed({"a": 3.0}, change_s=1.0, now=0.0) == {"a": 3.0}
    assert wants.believed({"a": 0.0}, change_s=1.0, now=1.0) == {"a": 3.0}
    assert wants.believed({"a": 5.0}, change_s=1.0, now=2.0) == {"a": 5.0}
    assert wants.believed({"a": 0.0}, change_s=1.0, now=3.0) == {"a": 5.0}
    assert wants.believed({"a": 2.0}, change_s=1.0, now=4.0) == {"a": 5.0}
    assert wants.believed({"a": 0.0}, change_s=1.0, now=5.1) == {"a": 2.0}  # the most of what it wanted meanwhile
    assert wants.believed({"a": 0.0}, change_s=1.0, now=7.2) == {}
    assert wants.believed({}, change_s=1.0, now=7.3) == {}


def test_the_time_of_a_change_is_learnt_per_worker_and_guessed_from_others() -> None:
    changes = ChangeoverTimes()
    assert changes.estimate("w") == CHANGE_S
    changes.learn("w", 0.2)
    changes.learn("w", 0.4)
    assert changes.estimate("w") == pytest.approx(0.3)
    assert changes.estimate("other") == pytest.approx(0.3)
    for number in range(100):
        changes.learn(f"gone{number}", 5.0)
    changes.keep({"w"})
    assert len(changes._known) == 1
    assert changes.estimate("w") == pytest.approx(0.3)
