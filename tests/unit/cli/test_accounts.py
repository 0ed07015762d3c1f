"""What was generated, and what of it twice."""

from pathlib import Path

from ebbtide.demo.token_accounts import InFlightTokens, LedgerAttempt, read_attempts, settle
from ebbtide.ledger import Ledger
from ebbtide.types.fleet import AttemptRef


def test_one_attempt_each_generates_nothing_twice() -> None:
    accounts = settle({"a": [LedgerAttempt("w1", 0, 30)], "b": [LedgerAttempt("w2", 0, 12)]}, killed=())
    assert (accounts.generated, accounts.twice, accounts.interrupted) == (42, 0, 0)
    assert accounts.by_worker == {"w1": 30, "w2": 12}


def test_what_a_killed_worker_had_not_stored_counts_as_twice() -> None:
    accounts = settle({"a": [LedgerAttempt("w1", 24, 10), LedgerAttempt("w2", 0, 29)]}, killed={"w2"})
    assert accounts.lost == {"a": 5}
    assert accounts.interrupted == 1


def test_a_response_that_ends_sooner_the_second_time_still_counts_all_that_was_lost() -> None:
    accounts = settle({"a": [LedgerAttempt("w1", 24, 2), LedgerAttempt("w2", 0, 30)]}, killed={"w2"})
    assert accounts.twice == 6


def test_of_two_attempts_from_the_start_the_killed_one_was_first() -> None:
    accounts = settle({"a": [LedgerAttempt("w1", 0, 3), LedgerAttempt("w2", 0, 6)]}, killed={"w2"})
    assert accounts.lost == {"a": 6}


def test_a_rollout_handed_over_whole_loses_nothing() -> None:
    accounts = settle(
        {"a": [LedgerAttempt("w1", 0, 10), LedgerAttempt("w2", 10, 10), LedgerAttempt("w3", 20, 1)]}, killed=()
    )
    assert (accounts.generated, accounts.twice, accounts.interrupted) == (21, 0, 0)


def test_a_rollout_killed_twice_counts_both_losses() -> None:
    attempts = {"a": [LedgerAttempt("w1", 0, 10), LedgerAttempt("w2", 8, 10), LedgerAttempt("w3", 16, 4)]}
    accounts = settle(attempts, killed={"w1", "w2"})
    assert accounts.lost == {"a": 4}
    assert accounts.interrupted == 2


def write(path: Path, *records: tuple[str, str, int, int]) -> None:
    with Ledger(path) as ledger:
        for run, rollout, start, generated in records:
            ledger.add(ledger.open(AttemptRef(run, rollout, f"{rollout}.{start}"), start), generated)


def test_only_the_run_in_question_counts_and_a_worker_that_never_wrote_has_none(tmp_path: Path) -> None:
    write(tmp_path / "one", ("mine", "s0.g0.0.t0", 0, 5), ("other", "s0.g0.0.t0", 0, 9))
    attempts = read_attempts({"w1": tmp_path / "one", "w2": tmp_path / "none"}, "mine")
    assert attempts == {"s0.g0.0.t0": [LedgerAttempt("w1", 0, 5)]}


def test_rollouts_in_flight_are_those_of_training_that_grew_since_the_last_look(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    flight = InFlightTokens(path)
    assert flight.look(range(99)) == 0
    with Ledger(path) as ledger:
        entries = {name: ledger.open(AttemptRef("run", name, name), 0) for name in ("s1.a", "s1.b", "s1.done", "e0.p1")}
        for entry in entries.values():
            ledger.add(entry, 20)
        assert flight.look(range(99)) == 0  # seen for the first time
        for name in ("s1.a", "s1.b", "e0.p1"):
            ledger.add(entries[name], 1)
        ledger.add(entries["s1.b"], 9)
        assert flight.look(range(25)) == 1
        ledger.add(entries["s1.a"], 1)
        ledger.add(entries["s1.b"], 1)
        assert flight.look(range(99)) == 2
        assert flight.look(range(99)) == 0  # nothing grew any more


def test_rollouts_in_flight_may_be_of_any_kind(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    flight = InFlightTokens(path, prefix="")
    with Ledger(path) as ledger:
        entry = ledger.open(AttemptRef("run", "e0.p1", "e0.p1"), 0)
        assert flight.look(range(99)) == 0
        ledger.add(entry, 2)
        assert flight.look(range(99)) == 1
