"""A rule that promises too much stops itself, and goes on once it keeps its promises again. Moves stay few."""

from ebbtide.coordinator.rules.move_costs import MoveLedger


def judged(ledger: MoveLedger, moves: int, *, promised: float = 100.0, made: float) -> None:
    for _ in range(moves):
        ledger.judge(promised, made)


def test_moves_that_keep_their_promises_go_on() -> None:
    ledger = MoveLedger()
    judged(ledger, 50, made=60.0)
    assert ledger.allows(0.0, running=100) == 45
    assert (ledger.judged, ledger.promised_tokens, ledger.made_tokens) == (50, 5_000.0, 3_000.0)


def test_a_few_moves_that_fail_prove_nothing() -> None:
    ledger = MoveLedger()
    judged(ledger, 7, made=-500.0)
    assert ledger.trusted


def test_moves_that_make_too_little_stop_but_for_one_a_minute() -> None:
    ledger = MoveLedger()
    judged(ledger, 12, made=20.0)
    assert ledger.allows(1_000.0, running=100) == 1
    ledger.asked(1, 1_000.0)
    assert ledger.allows(1_059.0, running=100) == 0
    assert ledger.allows(1_061.0, running=100) == 1


def test_nearly_half_of_the_rollouts_that_run_may_move_and_a_quarter_of_those_that_finished() -> None:
    ledger = MoveLedger()
    ledger.asked(40, 0.0)
    assert ledger.allows(0.0, running=100) == 5
    ledger.asked(5, 0.0)
    assert ledger.allows(0.0, running=100) == 0
    ledger.finished = 40
    assert ledger.allows(0.0, running=60) == 0
    assert ledger.allows(0.0, running=100) == 10


def test_a_rule_that_failed_once_is_believed_again_after_it_has_held() -> None:
    ledger = MoveLedger()
    judged(ledger, 100, made=0.0)
    assert not ledger.trusted
    judged(ledger, 20, made=100.0)
    assert ledger.trusted


def test_large_promises_weigh_more_than_small_ones() -> None:
    ledger = MoveLedger()
    judged(ledger, 10, promised=1.0, made=-5.0)
    judged(ledger, 2, promised=1_000.0, made=900.0)
    assert ledger.trusted


def test_moves_are_told_once_and_what_promised_nothing_is_not_judged() -> None:
    ledger = MoveLedger()
    ledger.asked(3, 0.0)
    assert (ledger.take_moves(), ledger.take_moves(), ledger.moves) == (3, 0, 3)
    ledger.judge(-5.0, -100.0)
    assert (ledger.judged, ledger.kept) == (0, 1.0)
