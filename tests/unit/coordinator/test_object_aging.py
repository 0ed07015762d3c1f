"""The coordinator's old objects cost its collections nothing, and their cycles are freed in the end."""

import asyncio
import gc
import sys
import weakref
from collections.abc import Iterator

import pytest

from ebbtide.coordinator import object_aging
from ebbtide.coordinator.object_aging import HeapGrowth, age_objects, set_aside, walk_all
from ebbtide.testing import wait_until


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
    young, kept = weakref.ref(Node()), Node()
    set_aside()
    assert young() is None
    assert not any(one is kept for one in gc.get_objects()), "no collection looks at it"


def test_an_old_cycle_is_freed_by_the_walk_over_everything() -> None:
    old = Node()
    set_aside()
    seen = weakref.ref(old)
    del old
    gc.collect()
    assert seen() is not None
    walk_all()
    assert seen() is None


async def test_survivors_are_set_aside_while_the_coordinator_runs() -> None:
    aging = asyncio.create_task(age_objects())
    try:
        await asyncio.sleep(0)
        kept = [Node() for _ in range(20_000)]
        await wait_until(lambda: gc.get_freeze_count() > len(kept), timeout=10)
        assert gc.get_threshold()[2] > 1_000_000, "Python itself never walks all objects"
    finally:
        aging.cancel()


async def test_cycles_that_were_set_aside_are_freed_when_memory_has_doubled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_aging, "_EVERY_S", 0.01)
    blocks = 1000
    monkeypatch.setattr(sys, "getallocatedblocks", lambda: blocks)
    aging = asyncio.create_task(age_objects(HeapGrowth(few=1500)))
    try:
        await asyncio.sleep(0)
        before = gc.get_freeze_count()
        cycles = [Node() for _ in range(20_000)]
        await wait_until(lambda: gc.get_freeze_count() > before + len(cycles) // 2, timeout=30)
        seen = weakref.ref(cycles[0])
        cycles.clear()
        gc.collect()
        assert seen() is not None
        blocks = 2000
        await wait_until(lambda: seen() is None, timeout=30)
    finally:
        aging.cancel()


def test_a_small_heap_is_no_reason_for_a_walk_and_a_large_one_only_when_it_doubles(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    blocks = 100
    monkeypatch.setattr(sys, "getallocatedblocks", lambda: blocks)
    growth = HeapGrowth(few=1000)
    blocks = 999
    assert not growth.doubled()
    blocks = 1000
    assert growth.doubled()
    growth.walked()
    blocks = 1999
    assert not growth.doubled()
    blocks = 2000
    assert growth.doubled()
