"""The coordinator's old objects cost its collections nothing, and their cycles are freed in the end."""

import asyncio
import gc
import weakref
from collections.abc import Iterator

import pytest

from ebbtide.coordinator import object_aging
from ebbtide.coordinator.object_aging import FrozenGrowth, age_objects, set_aside, walk_all
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


async def test_cycles_that_were_set_aside_are_freed_when_objects_have_doubled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_aging, "_EVERY_S", 0.01)
    aging = asyncio.create_task(age_objects(FrozenGrowth(few=1000)))
    try:
        await asyncio.sleep(0)
        before = gc.get_freeze_count()
        cycles = [Node() for _ in range(before // 4)]
        await wait_until(lambda: gc.get_freeze_count() > before + len(cycles), timeout=30)
        seen = weakref.ref(cycles[0])
        cycles.clear()
        gc.collect()
        assert seen() is not None
        kept = [Node() for _ in range(before)]
        await wait_until(lambda: seen() is None, timeout=30)
        assert gc.get_freeze_count() < before + 2 * len(kept) + before // 2
    finally:
        aging.cancel()


def test_objects_are_counted_only_when_they_may_have_doubled(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = [1000, 1900, 2000]
    monkeypatch.setattr(gc, "get_freeze_count", lambda: counts.pop(0))
    growth = FrozenGrowth(few=400)
    assert not growth.doubled(999)
    assert len(counts) == 2
    assert not growth.doubled(1)  # most of what was added has gone again
    assert not growth.doubled(99)
    assert len(counts) == 1
    assert growth.doubled(1)


def test_few_objects_are_not_walked_when_they_double(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gc, "get_freeze_count", lambda: 100)
    growth = FrozenGrowth(few=1000)
    assert not growth.doubled(100)
    assert not growth.doubled(800)
