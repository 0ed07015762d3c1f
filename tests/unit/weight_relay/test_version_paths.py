"""The cheapest ways to a version, when a keyframe is due, and when composing pays."""

import itertools
import random

import pytest

from ebbtide.types.weights import FetchPath
from ebbtide.weight_relay.version_paths import (
    PatchStep,
    composed_size,
    find_paths,
    passages,
    wants_keyframe,
    whole_versions,
    worth_composing,
)

CHAIN = [PatchStep(version, version + 1, 10) for version in range(1, 6)]


def test_a_holder_of_an_older_version_goes_by_patches() -> None:
    assert find_paths({1: 100}, CHAIN, 5, [3]) == [FetchPath(start=3, keyframe=False, via=(4, 5), size=20)]


def test_who_holds_nothing_starts_at_the_keyframe_that_costs_least() -> None:
    assert find_paths({1: 100, 4: 100}, CHAIN, 6, []) == [FetchPath(start=4, keyframe=True, via=(5, 6), size=120)]


def test_a_keyframe_is_named_too_where_it_is_cheaper_or_asked_for() -> None:
    heavy = [PatchStep(1, 2, 300)]
    assert [way.start for way in find_paths({2: 100}, heavy, 2, [1])] == [2, 1]
    assert [way.start for way in find_paths({1: 100}, CHAIN, 5, [3])] == [3]
    assert [way.start for way in find_paths({1: 100}, CHAIN, 5, [3], scratch=True)] == [3, 1]


def test_each_version_held_in_part_gets_its_own_path() -> None:
    assert [(way.start, way.via) for way in find_paths({}, CHAIN, 5, [2, 4, 5])] == [(5, ()), (4, (5,)), (2, (3, 4, 5))]


def test_back_to_an_older_version_leads_a_keyframe_or_a_patch_made_for_it() -> None:
    assert find_paths({1: 100}, CHAIN, 3, [5]) == [FetchPath(start=1, keyframe=True, via=(2, 3), size=120)]
    assert find_paths({1: 100}, [*CHAIN, PatchStep(5, 3, 7)], 3, [5])[0] == FetchPath(
        start=5, keyframe=False, via=(3,), size=7
    )


def test_where_nothing_leads_there_is_no_path() -> None:
    assert find_paths({4: 100}, CHAIN, 2, [3]) == []


@pytest.mark.parametrize("seed", range(30))
def test_no_way_is_cheaper_than_the_first(seed: int) -> None:
    chance = random.Random(seed)
    nodes = range(1, 7)
    steps = [PatchStep(a, b, chance.randint(1, 30)) for a in nodes for b in nodes if a != b and chance.random() < 0.4]
    keyframes = {version: 40 for version in nodes if chance.random() < 0.4}
    have = [version for version in nodes if chance.random() < 0.3]
    costs = {(step.base, step.version): step.size for step in steps}
    every = [
        (40 if start not in have else 0) + sum(costs[pair] for pair in itertools.pairwise(path))
        for start in {*have, *keyframes}
        for length in range(6)
        for rest in itertools.permutations([node for node in nodes if node not in {start, 6}], max(0, length - 1))
        for path in [(start, *rest, 6) if start != 6 else (6,)]
        if all(pair in costs for pair in itertools.pairwise(path))
    ]
    found = find_paths(keyframes, steps, 6, have)
    assert (found[0].size if found else None) == min(every, default=None)
    for way in found:
        path = (way.start, *way.via)
        assert path[-1] == 6
        assert way.size % 1 == 0
        assert all(pair in costs for pair in itertools.pairwise(path))


def test_whole_is_what_a_keyframe_leads_to_and_passages_are_what_leads_there() -> None:
    assert whole_versions({3}, CHAIN) == {3, 4, 5, 6}
    assert passages({3, 4}, CHAIN) == {1, 2, 3, 4}


@pytest.mark.parametrize(
    ("via", "size", "room", "due"),
    [
        ((), 1000, 9000, False),
        ((2,), 1010, 9000, False),
        (tuple(range(2, 18)), 1010, 9000, True),
        ((2,), 1501, 9000, True),
        ((2,), 1010, 1200, True),
        ((2,), 1010, 900, False),
    ],
)
def test_a_keyframe_is_due_when_the_way_is_long_or_heavy_or_room_ends(
    via: tuple[int, ...], size: int, room: int, due: bool
) -> None:
    way = FetchPath(start=1, keyframe=True, via=via, size=size)
    assert wants_keyframe(way, 1000, room, every=16, share=0.5) == due


def test_steps_that_change_the_same_elements_compose_to_less_than_their_sum() -> None:
    step = PatchStep(1, 2, 400_000, changed=300_000, elements=1_000_000)
    size = composed_size([step] * 5)
    assert size < 5 * step.size
    assert size > step.size
    assert composed_size([PatchStep(1, 2, 50)] * 3) == 150


def test_composing_pays_on_slow_links_and_not_on_fast_ones() -> None:
    chain = [PatchStep(1, 2, 400_000, changed=300_000, elements=1_000_000)] * 10
    assert worth_composing(chain, 1e6, 200e6)
    assert not worth_composing(chain, 10e9, 200e6)
    assert not worth_composing(chain[:1], 1e3, 200e6)
    assert not worth_composing([PatchStep(1, 2, 400_000, changed=10, elements=10**9)] * 2, 1e6, 200e6)
