"""Rounds over whole groups: each group is trained once, in time, in steps of equal size, whatever ends when."""

from collections.abc import Iterator
from random import Random

import pytest

from ebbtide.driver.group_rounds import GroupRounds

PER_STEP = 8


def rounds(*, steps: int = 12, max_age: int = 3, excess: float = 1.5, per_step: int = PER_STEP) -> GroupRounds:
    return GroupRounds(groups_per_step=per_step, steps=steps, max_age=max_age, excess=excess)


def played(made: GroupRounds, draw: Random, steps: range) -> Iterator[tuple[int, list[int]]]:
    """Each step with the groups that it took. Draws which open group becomes whole next; some seldom do."""
    for step in steps:
        made.open(step)
        taken = list(made.take())
        while not made.complete:
            awaited, running = set(made.awaited()), [one for one in made.on_their_way if one not in made.waiting]
            quick = [one for one in running if one % 5] or running
            group = draw.choice(quick) if draw.random() < 0.9 else draw.choice(running)
            if not set(running) - awaited:
                group = draw.choice(sorted(awaited))
            made.whole(group)
            taken += made.take()
        yield step, taken


@pytest.mark.parametrize("seed", range(40))
def test_every_group_is_trained_once_in_whole_steps_and_within_its_age(seed: int) -> None:
    draw = Random(seed)
    max_age, excess, per_step = draw.randrange(1, 6), draw.uniform(1.0, 2.0), draw.randrange(1, 12)
    made = rounds(steps=30, max_age=max_age, excess=excess, per_step=per_step)
    begun: dict[int, int] = {}
    opened = made.open

    def noted(step: int) -> list[int]:
        found = list(opened(step))
        begun.update(dict.fromkeys(found, step))
        return found

    made.open = noted  # type: ignore[method-assign]
    trained: list[int] = []
    for step, taken in played(made, draw, range(30)):
        assert len(taken) == per_step
        assert all(0 <= step - begun[group] <= max_age for group in taken)
        trained += taken
    assert sorted(trained) == list(range(30 * per_step))
    assert not made.on_their_way


def test_a_step_keeps_places_for_groups_of_the_greatest_age() -> None:
    made = rounds(max_age=1)
    assert list(made.open(0)) == list(range(12))
    for group in range(4, 12):
        made.whole(group)
    assert list(made.take()) == list(range(4, 12))
    assert made.complete
    assert list(made.open(1)) == list(range(12, 20))
    for group in range(12, 20):
        made.whole(group)
    assert list(made.take()) == [12, 13, 14, 15], "four places are for the groups of the former step"
    for group in range(4):
        made.whole(group)
    assert list(made.take()) == [0, 1, 2, 3]
    assert made.complete


def test_nothing_is_begun_that_no_step_will_train() -> None:
    made = rounds(steps=2, excess=2.0)
    assert len(made.open(0)) == 16
    for group in range(8):
        made.whole(group)
    made.take()
    assert not made.open(1)


@pytest.mark.parametrize("step", [0, 1, 4])
def test_a_process_that_follows_decides_as_the_former_one_would_have(step: int) -> None:
    begun: dict[int, int] = {}
    taken: list[int] = []
    former, draw = rounds(), Random(step)
    for at in range(step):
        begun |= dict.fromkeys(former.open(at), at)
        former_taken = list(former.take())
        while not former.complete:
            former.whole(draw.choice([one for one in former.on_their_way if one not in former.waiting]))
            former_taken += former.take()
        taken += former_taken
    begun |= dict.fromkeys(former.open(step), step)
    group = draw.choice([one for one in former.on_their_way if one not in former.waiting])
    former.whole(group)
    of_step = list(former.take())
    follower = rounds()
    follower.restore(begun, taken + of_step, step=step, of_step=len(of_step))
    assert not follower.open(step)
    for one in follower.on_their_way:
        follower.whole(one)
    for one in [one for one in former.on_their_way if one not in former.waiting]:
        former.whole(one)
    assert list(follower.take()) == list(former.take())
    assert follower.complete
    assert former.complete


@pytest.mark.parametrize(("max_age", "excess"), [(0, 1.25), (1, 0.9), (1, 2.1)])
def test_terms_that_could_lose_a_group_are_refused(max_age: int, excess: float) -> None:
    with pytest.raises(ValueError, match="max_age"):
        rounds(max_age=max_age, excess=excess)
