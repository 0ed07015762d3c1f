"""A service's old objects cost its collections nothing."""

import asyncio
import gc
import weakref
from collections.abc import Iterator

import pytest

from ebbtide.object_aging import age_objects, set_aside
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


async def test_survivors_are_set_aside_while_the_service_runs() -> None:
    aging = asyncio.create_task(age_objects())
    try:
        await asyncio.sleep(0)
        kept = [Node() for _ in range(20_000)]
        await wait_until(lambda: gc.get_freeze_count() > len(kept), timeout=10)
        assert gc.get_threshold()[2] > 1_000_000, "Python itself never walks all objects"
    finally:
        aging.cancel()
