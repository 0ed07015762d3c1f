"""A trainer that waits for its device says what for."""

from pathlib import Path

from ebbtide.trainer.lending.device_loan import DeviceLoan
from ebbtide.types.grants import LoanState


def test_a_trainer_whose_guard_knows_no_turns_says_so(tmp_path: Path) -> None:
    """One of a release without turns, or with another owner, gives the device back, and never a turn."""
    loan = DeviceLoan(tmp_path, run_id="r", lease=1, pids=(7,))
    loan.want(loan.next_wish(lend=False, spell_s=0.0))
    loan._state = LoanState(sequence=loan.wish.sequence, compute_back=True, memory_back=True)
    assert not loan.progress().back
    assert "owner = turns" in loan.progress().waits_for
    loan._state = LoanState(sequence=loan.wish.sequence, waits_for="the turn of run b")
    assert loan.progress().waits_for == "the turn of run b"
