"""Victims free the blocks at a low cost."""

import itertools
import random

import pytest

from ebbtide.rollout_worker.engine.kv_victims import HeldRequest, choose_victims, recompute_cost


def held(seed: int, count: int) -> list[HeldRequest]:
    generator = random.Random(seed)
    items = []
    for index in range(count):
        blocks = generator.randint(1, 12)
        shared = 16 * generator.randint(0, 4)
        items.append(HeldRequest(request=f"r{index}", computed=shared + 16 * blocks, blocks=blocks, shared=shared))
    return items


def cost(items: list[HeldRequest]) -> float:
    return sum(recompute_cost(item.computed, item.shared) for item in items)


@pytest.mark.parametrize("seed", range(200))
def test_the_victims_free_enough_and_none_of_them_could_be_left_out(seed: int) -> None:
    items = held(seed, 10)
    needed = random.Random(seed).randint(1, sum(item.blocks for item in items))
    victims = choose_victims(items, needed)
    freed = {item.request: item.blocks for item in items}
    total = sum(freed[name] for name in victims)
    assert total >= needed
    assert len(set(victims)) == len(victims)
    assert all(total - freed[name] < needed for name in victims)


@pytest.mark.parametrize("seed", range(100))
def test_they_cost_at_most_twice_the_least_possible(seed: int) -> None:
    items = held(seed, 8)
    needed = random.Random(seed).randint(1, sum(item.blocks for item in items))
    by_name = {item.request: item for item in items}
    mine = cost([by_name[name] for name in choose_victims(items, needed)])
    subsets = itertools.chain.from_iterable(itertools.combinations(items, n) for n in range(1, 9))
    best = min(cost(list(some)) for some in subsets if sum(item.blocks for item in some) >= needed)
    assert mine <= 2 * best + 1e-9


def test_long_contexts_cost_more_per_block_than_short_ones() -> None:
    long = HeldRequest(request="long", computed=8192, blocks=512)
    short = [HeldRequest(request=f"s{i}", computed=512, blocks=32) for i in range(16)]
    assert set(choose_victims([long, *short], 512)) == {item.request for item in short}


def test_one_that_is_almost_finished_is_kept() -> None:
    ending = HeldRequest(request="ending", computed=160, blocks=10, remaining=3)
    fresh = HeldRequest(request="fresh", computed=176, blocks=11, remaining=500)
    assert choose_victims([ending, fresh], 10) == ["fresh"]


def test_one_that_frees_nothing_is_left_alone() -> None:
    sharer = HeldRequest(request="sharer", computed=160, blocks=0, shared=160)
    assert choose_victims([sharer], 5) == []
    assert choose_victims([sharer, HeldRequest(request="own", computed=160, blocks=10)], 5) == ["own"]


def test_a_shared_prefix_costs_nothing_again() -> None:
    sharer = HeldRequest(request="sharer", computed=4000, shared=3840, blocks=10)
    alone = HeldRequest(request="alone", computed=170, blocks=10)
    assert recompute_cost(4000, 3840) < recompute_cost(4000)
    assert choose_victims([sharer, alone], 10) == ["alone"], "attention to a long prefix is read again all the same"


def test_everything_goes_if_even_that_is_not_enough() -> None:
    items = held(1, 4)
    assert set(choose_victims(items, 10_000)) == {item.request for item in items}


def test_nothing_goes_if_nothing_is_needed() -> None:
    assert choose_victims(held(1, 4), 0) == []


def test_the_choice_does_not_hang_on_the_order_of_requests() -> None:
    items = held(3, 9)
    shuffled = items[::-1]
    assert set(choose_victims(items, 20)) == set(choose_victims(shuffled, 20))
