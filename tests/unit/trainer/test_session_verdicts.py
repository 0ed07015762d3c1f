"""The driver has each session that waits judged, and posts what comes of it."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import numpy as np
import pytest

from ebbtide.driver.environment_host import BranchText
from ebbtide.driver.verdicts import SessionVerdicts, VerdictFailed, branch_texts
from ebbtide.errors import LeaseSuperseded, NotFound
from ebbtide.run_client import Conversations
from ebbtide.types.rollout import Trajectory
from ebbtide.types.session import UnverifiedSession
from ebbtide.types.tokens import TOKEN, pack_ids
from tests.fakes.model_texts import byte_level_tokenizer
from tests.support.waiting import wait_until

TOKENIZER = byte_level_tokenizer()
CONVERSATIONS = Conversations(TOKENIZER, context=0, end_ids=frozenset([TOKENIZER.eos_token_id]))


def trajectory(number: int, prompt: str, *parts: tuple[str, bool]) -> Trajectory:
    """A branch of texts, and whether they were sampled. Sampled ones end with the end token."""
    ids, versions = list[int](), list[int]()
    for text, sampled in parts:
        made = TOKENIZER.encode(text, add_special_tokens=False) + [TOKENIZER.eos_token_id] * sampled
        ids += made
        versions += [2 * sampled] * len(made)
    tokens = np.zeros(len(ids), dtype=TOKEN)
    tokens["id"], tokens["version"] = ids, versions
    return Trajectory(
        episode_id=f"s.{number}",
        group_id="g",
        step=0,
        group_size=1,
        prompt_ids=pack_ids(TOKENIZER.encode(prompt, add_special_tokens=False)),
        tokens=tokens.tobytes(),
        loss_mask=bytes(len(ids)),
        reward=0.0,
    )


SESSION = UnverifiedSession(
    session_id="s",
    verifier="exact",
    data=b'{"answer":"eno"}',
    trajectories=(
        trajectory(10, "question", ("later", True)),
        trajectory(2, "spell one", ("eno", True), ("\nand two", False), ("owt", True)),
    ),
)


def test_a_verifier_reads_what_was_sampled_and_what_stood_around_it_in_the_order_of_the_branches() -> None:
    assert branch_texts(SESSION, CONVERSATIONS) == [
        BranchText((("spell one", False), ("eno", True), ("\nand two", False), ("owt", True)), truncated=False),
        BranchText((("question", False), ("later", True)), truncated=False),
    ]


class Judge:
    """Processes that give what they are told to."""

    def __init__(self, *verdicts: float | VerdictFailed) -> None:
        self.verdicts = list(verdicts)
        self.asked: list[tuple[str, bytes, float]] = []

    async def reward(self, name: str, branches: list[BranchText], data: bytes, limit_s: float) -> float:
        self.asked.append((name, data, limit_s))
        verdict = self.verdicts.pop(0)
        if isinstance(verdict, VerdictFailed):
            raise verdict
        return verdict


class WaitingSessions:
    """A lease with sessions that wait."""

    def __init__(self, count: int, ends: asyncio.Event | None = None) -> None:
        self.count, self.ends = count, ends
        self.posted: list[tuple[float | None, str]] = []

    async def unverified(self) -> AsyncGenerator[UnverifiedSession, None]:
        for _ in range(self.count):
            yield SESSION
        await (self.ends or asyncio.Event()).wait()
        raise LeaseSuperseded("step down")

    async def post_verdict(self, session_id: str, *, reward: float | None, drop_reason: str) -> None:
        self.posted.append((reward, drop_reason))
        if len(self.posted) == 1:
            raise NotFound("it was forgotten")


async def test_rewards_and_reasons_are_posted_and_a_forgotten_session_ends_nothing() -> None:
    late = VerdictFailed("late", "verifier_timeout")
    ends, judge = asyncio.Event(), Judge(1.0, VerdictFailed("it raised"), 0.25, late)
    lease: Any = WaitingSessions(4, ends)
    processes: Any = judge
    verdicts = asyncio.create_task(SessionVerdicts(lease, processes, CONVERSATIONS, limit_s=7.0).run())
    await wait_until(lambda: len(lease.posted) == 4)
    assert sorted(lease.posted, key=str) == sorted(
        [(1.0, ""), (None, "verifier_failed"), (0.25, ""), (None, "verifier_timeout")], key=str
    )
    assert judge.asked == [("exact", b'{"answer":"eno"}', 7.0)] * 4
    ends.set()
    with pytest.raises(LeaseSuperseded):
        await verdicts
