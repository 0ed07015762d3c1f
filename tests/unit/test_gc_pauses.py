"""A service's old objects cost its collections nothing."""

import asyncio
import gc
import weakref
from collections.abc import Iterator

import pytest

from ebbtide.gc_pauses import age_objects, set_aside
from tests.support.waiting import wait_until


class Node:
    """In a cycle with itself."""

    def __init__(self) -> None:
        self.me = self


@pytest.fixture(autouse=True)
def collector() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)
    gc.unfreeze()


def test_a_young_cycle_is_freed_and_an_old_object_is_set_aside() -> None:
    set_aside()  # what the tests themselves have
    young, kept = weakref.ref(Node()), Node()
    set_aside()
    assert young() is None
    assert not any(one is kept for one in gc.get_objects()), "no collection looks at it"


def test_the_survivors_of_a_burst_are_not_walked_again() -> None:
    gc.set_threshold(700, 5, 1 << 30)
    set_aside()
    kept, walked = [Node() for _ in range(100_000)], list[int]()

    def told(phase: str, info: dict[str, int]) -> None:
        if phase == "stop":
            walked.append(info["generation"])

    gc.callbacks.append(told)
    try:
        set_aside()
    finally:
        gc.callbacks.remove(told)
    assert walked == [0], "walking all of them takes 50 ms"
    assert gc.get_freeze_count() > len(kept)


async def test_young_objects_stay_few_where_each_takes_an_old_ones_place() -> None:
    """As the state of open streams does: Python sees as many freed as made, and collects none."""
    kept = [Node() for _ in range(20_000)]
    aging = asyncio.create_task(age_objects())
    try:
        await asyncio.sleep(0)
        most = 0
        for round_ in range(20):
            for place in range(round_ * 1000, round_ * 1000 + 1000):
                kept[place].__dict__.clear()  # no cycle, so it is freed by the next line
                kept[place] = Node()
            await asyncio.sleep(0.02)
            most = max(most, len(gc.get_objects()))
        assert most < 15_000, "a collection walks all of them"
    finally:
        aging.cancel()


async def test_survivors_are_set_aside_while_the_service_runs() -> None:
    aging = asyncio.create_task(age_objects())
    try:
        await asyncio.sleep(0)
        kept = [Node() for _ in range(20_000)]
        await wait_until(lambda: gc.get_freeze_count() > len(kept), timeout=10)
        assert gc.get_threshold()[2] > 1_000_000, "Python itself never walks all objects"
    finally:
        aging.cancel()
