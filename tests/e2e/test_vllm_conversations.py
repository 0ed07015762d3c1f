"""Conversations through a gateway, on real engines that are killed."""

import asyncio
from typing import Final

import pytest

from tests.chaos.cluster import Cluster
from tests.e2e.conversing_fleet import ConversingFleet, Conversations

_CONVERSATIONS: Final = 6
_ROUNDS: Final = 4
_TOKENS: Final = 128
#: A worker is killed when each answer has so many tokens, and lacks most of the rest.
_BEHIND: Final = 24

pytestmark = pytest.mark.timeout(300)


async def test_greedy_conversations_under_three_kills_equal_undisturbed_ones_token_for_token(cluster: Cluster) -> None:
    async with ConversingFleet.running(cluster, workers=3) as fleet:
        undisturbed = Conversations(fleet, "quiet", _CONVERSATIONS, tokens=_TOKENS)
        for _ in range(_ROUNDS):
            await undisturbed.round()

        disturbed = Conversations(fleet, "killed", _CONVERSATIONS, tokens=_TOKENS)
        killed: list[str] = []

        async def kill() -> None:
            killed.append(await fleet.kill_busiest())

        await disturbed.round(kill, behind=_BEHIND)
        replacing = asyncio.create_task(fleet.join())
        await disturbed.round(kill, behind=_BEHIND)
        await replacing
        await disturbed.round(kill, behind=_BEHIND)
        await disturbed.round()

        assert disturbed.turns == undisturbed.turns
        assert len(set(killed)) == 3
        for name in killed:
            cut = {one.rollout_id for one in cluster.ledger(name) if 0 < one.generated < _TOKENS}
            resumed = {one.rollout_id for one in cluster.ledger() if one.start}
            assert cut & resumed, f"{name} held no answer when it was killed"
        for turns in disturbed.turns:
            for before, after in zip(turns, turns[1:], strict=False):
                known = before.prompt_ids + before.ids
                assert after.prompt_ids[: len(known)] == known, "a turn reads the tokens that were sampled"
