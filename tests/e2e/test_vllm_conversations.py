"""Conversations through a gateway, on real engines that are killed."""

import asyncio
import itertools
from typing import Final

import pytest

from tests.chaos.cluster import Cluster
from tests.e2e.conversing_fleet import TOKENS, Conversations, ConversingFleet

_CONVERSATIONS: Final = 6
_ROUNDS: Final = 4

pytestmark = pytest.mark.timeout(300)


async def test_greedy_conversations_under_three_kills_equal_undisturbed_ones_token_for_token(cluster: Cluster) -> None:
    async with ConversingFleet.running(cluster, workers=3) as fleet:
        undisturbed = Conversations(fleet, "quiet", _CONVERSATIONS)
        for _ in range(_ROUNDS):
            await undisturbed.ask_all()

        disturbed, killed = Conversations(fleet, "killed", _CONVERSATIONS), list[str]()
        for number in range(_ROUNDS):
            asking = asyncio.create_task(disturbed.ask_all())
            if number < 3:
                killed.append(await fleet.kill_amid_answers())
            if number == 0:
                await fleet.join()
            await asking

    assert disturbed.turns == undisturbed.turns
    for name in killed:
        cut = {one.rollout_id for one in cluster.ledger(name) if one.start + one.generated < TOKENS}
        resumed = {one.rollout_id for one in cluster.ledger() if one.start}
        assert cut & resumed, f"no answer that {name} had begun went on elsewhere"
    for turns in disturbed.turns:
        for before, after in itertools.pairwise(turns):
            known = before.prompt_ids + before.ids
            assert after.prompt_ids[: len(known)] == known, "a turn reads the tokens that were sampled"
