"""A real engine gives up the cache of an ended episode before that of one that waits."""

import asyncio

import pytest

from tests.e2e.conftest import Maker
from tests.e2e.eviction_facts import TEXT
from tests.e2e.facts import facts_of

pytestmark = pytest.mark.timeout(300)


async def test_an_ended_text_makes_room_before_an_older_one_that_may_go_on(make_checkpoint: Maker) -> None:
    facts = await asyncio.to_thread(facts_of, "eviction_facts", make_checkpoint(1))
    assert facts["told"]["waiting"] >= TEXT - 32  # but for the last block, which is always read
    assert facts["untold"]["waiting"] < TEXT - 32
