"""Large lists are taken in page by page; others have their turn in each pause."""

import asyncio

import pytest

from ebbtide.coordinator.api.calls import AT_ONCE, paced


@pytest.mark.parametrize("count", [0, 1, AT_ONCE, AT_ONCE + 1, 3 * AT_ONCE, 3 * AT_ONCE + 7])
async def test_pages_have_all_items_in_order(count: int) -> None:
    pages = [list(page) async for page in paced(range(count))]
    assert [item for page in pages for item in page] == list(range(count))
    assert all(0 < len(page) <= AT_ONCE for page in pages)


async def test_others_have_their_turn_between_pages_and_a_small_list_waits_for_nobody() -> None:
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(other())
    seen = [turns async for _ in paced(range(AT_ONCE))]
    assert seen == [0]
    seen = [turns async for _ in paced(range(4 * AT_ONCE))]
    task.cancel()
    assert sorted(set(seen)) == seen
