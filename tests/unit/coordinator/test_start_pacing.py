"""Rollouts start at once, but not while the coordinator is behind; and never wait for ever."""

from ebbtide.coordinator.dispatch.dispatch_round import StartPacing


def test_rollouts_start_at_once_while_turns_are_short() -> None:
    pacing = StartPacing()
    assert pacing.held_s(0.0) == 0.0
    assert not pacing.note_turn(0.05, now=1.0)
    assert pacing.held_s(1.0) == 0.0


def test_after_a_slow_turn_none_starts_for_some_such_turns() -> None:
    pacing = StartPacing()
    assert pacing.note_turn(0.1, now=1.0)
    assert 0.0 < pacing.held_s(1.25) <= 0.051
    assert pacing.held_s(1.31) == 0.0


def test_one_batch_starts_each_second_however_slow_turns_are() -> None:
    pacing, now, batches = StartPacing(), 0.0, 0
    while now < 100.0:
        if wait_s := pacing.held_s(now):
            now += wait_s
        else:
            batches += 1
            now += 5.0  # the turn after the batch
            pacing.note_turn(5.0, now)
    assert batches >= 100 / (5.0 + 1.0) - 1
