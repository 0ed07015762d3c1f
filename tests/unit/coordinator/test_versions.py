"""Laws of who should have which version."""

import random
from typing import Any

import pytest

from ebbtide.coordinator.dispatch.installs import (
    ServedVersion,
    fits_nowhere,
    target_versions,
    unservable,
)
from ebbtide.coordinator.rules.worker_view import admits
from ebbtide.step_pacing import VersionBounds


def serving(name: Any, installed: Any, running: Any = 0, *held: Any) -> Any:
    return ServedVersion(
        session_id=name, installed=installed, running=running, held=frozenset(VersionBounds(*b) for b in held)
    )


def test_everybody_should_have_the_newest() -> None:
    assert target_versions([serving("a", 1), serving("b", 0)], [], [1, 2, 3]) == {"a": 3, "b": 3}
    assert target_versions([serving("a", 1)], [], []) == {}


def test_a_worker_stays_for_rollouts_with_a_ceiling_until_they_end() -> None:
    assert target_versions([serving("a", 1, 2, (1, 1), (0, 0))], [], [1, 2]) == {"a": 1}
    assert target_versions([serving("a", 1, 1, (1, 0))], [], [1, 2]) == {"a": 2}
    assert target_versions([serving("a", 1, 1, (0, 2))], [], [1, 2]) == {"a": 2}


def test_one_worker_goes_back_for_a_ceiling_that_waits_and_the_idlest_does() -> None:
    workers = [serving("a", 3, 5), serving("b", 3, 1), serving("c", 3, 4)]
    assert target_versions(workers, [VersionBounds(1, 2)], [1, 2, 3]) == {"a": 3, "b": 2, "c": 3}


def test_one_that_still_has_such_a_version_is_chosen_before_one_that_must_go_back() -> None:
    workers = [serving("a", 3, 0), serving("b", 2, 6)]
    assert target_versions(workers, [VersionBounds(1, 2)], [1, 2, 3]) == {"a": 3, "b": 2}


def test_one_worker_may_serve_several_ceilings() -> None:
    workers = [serving("a", 3), serving("b", 3)]
    targets = target_versions(workers, [VersionBounds(1, 2), VersionBounds(0, 2), VersionBounds(2, 2)], [1, 2, 3])
    assert sorted(targets.values()) == [2, 3]


def test_ceilings_without_a_version_that_can_be_had_move_nobody() -> None:
    assert target_versions([serving("a", 3)], [VersionBounds(1, 1)], [2, 3]) == {"a": 3}
    assert unservable(VersionBounds(1, 1), [2, 3])
    assert not unservable(VersionBounds(1, 2), [2, 3])
    assert not unservable(VersionBounds(4, 4), [2, 3])  # it will come
    assert not unservable(VersionBounds(4, 0), [2, 3])
    assert not unservable(VersionBounds(0, 2), [])


@pytest.mark.parametrize("seed", range(200))
def test_no_target_breaks_a_bound_that_is_held_and_every_ceiling_that_can_be_served_is(seed: Any) -> None:
    draw = random.Random(seed)
    announced = sorted(draw.sample(range(1, 8), draw.randint(1, 5)))
    workers = []
    for number in range(draw.randint(1, 5)):
        installed = draw.choice([0, *announced])
        held = [(draw.choice([0, installed]), draw.choice([0, installed, 7])) for _ in range(draw.randint(0, 3))]
        workers.append(serving(f"w{number}", installed, len(held) if installed else 0, *(held if installed else ())))
    ceilings = [VersionBounds(0, draw.choice(announced)) for _ in range(draw.randint(0, 2))]
    targets = target_versions(workers, ceilings, announced)
    for one in workers:
        assert all(admits(bounds, targets[one.session_id]) for bounds in one.held)
        assert targets[one.session_id] in {*announced, one.installed}
    if workers and not any(one.held for one in workers):
        distinct = {bounds for bounds in ceilings if bounds.maximum < announced[-1]}
        served = [b for b in distinct if any(admits(b, target) for target in targets.values())]
        assert len(served) >= min(len(distinct), len(workers))


def test_weights_fit_nowhere_once_every_worker_had_several_chances_to_refuse_them() -> None:
    assert fits_nowhere("b", ["a"], 3)
    assert not fits_nowhere("b", ["a"], 2)
    assert not fits_nowhere("b", ["a", "c"], 5)
    assert fits_nowhere("b", ["a", "c"], 6)
    assert not fits_nowhere("b", ["a", "b"], 100)
    assert not fits_nowhere("b", [], 100)
