"""How finished rollouts come together in messages."""

from ebbtide.coordinator.api.rollouts import finished_messages
from ebbtide.types.rollout import FinishedRollout, FinishReason


def finish(number: int, *, tokens: int, message: str = "") -> FinishedRollout:
    name = f"r{number}"
    return FinishedRollout(
        rollout_id=name,
        group_id=name,
        episode_id=name,
        reason=FinishReason.STOP,
        tokens=bytes(12 * tokens),
        message=message,
    )


def test_no_message_has_more_than_a_megabyte_of_rollouts_whatever_they_are_made_of() -> None:
    page = [finish(number, tokens=10_000 * (number % 2), message="evidence" * 5_000) for number in range(90)]
    messages = list(finished_messages(page, grouped=True))
    assert [one.rollout_id for each in messages for one in (each, *each.others)] == [one.rollout_id for one in page]
    assert 1 < len(messages) < len(page)
    assert max(one.ByteSize() for one in messages) < (1 << 20) + 4_096  # frames of the members


def test_rollouts_come_one_by_one_unless_they_were_asked_for_together() -> None:
    assert len(list(finished_messages([finish(number, tokens=1) for number in range(5)], grouped=False))) == 5


def test_a_rollout_that_is_larger_comes_alone_and_those_around_it_stay_in_order() -> None:
    page = [finish(number, tokens=tokens) for number, tokens in enumerate((2, 3, 100_000, 1, 1))]
    messages = list(finished_messages(page, grouped=True))
    assert [[one.rollout_id for one in (each, *each.others)] for each in messages] == [
        ["r0", "r1"],
        ["r2"],
        ["r3", "r4"],
    ]
