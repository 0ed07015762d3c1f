"""A batch of requests is drafted from its groups, step after step; drafts that do not pay end."""

from collections.abc import Sequence
from random import Random
from typing import Any

from benchmarks.long_tail.drafts.verifying_worker import VerifyingWorker
from ebbtide.rollout_worker.engine import SiblingRun
from ebbtide.types.tokens import pack_ids
from tests.fakes.plain_suffix_tree import PlainSuffixTree


def engine(responses: dict[str, list[int]], *, base_s: float = 0.01, token_s: float = 1e-4) -> VerifyingWorker:
    return VerifyingWorker(PlainSuffixTree, responses, base_s=base_s, token_s=token_s, now=100.0)


def alike(members: int, length: int = 200) -> dict[str, list[int]]:
    draw = Random(1)
    text = [draw.randrange(4, 1_000_000) for _ in range(length)]
    return {f"r{number}": text for number in range(members)}


def apart(members: int, length: int = 400) -> dict[str, list[int]]:
    """Few different tokens, in no order: short stretches are found, and what follows is a guess."""
    return {f"r{n}": [Random(f"{n} {at}").randrange(4, 12) for at in range(length)] for n in range(members)}


def test_a_member_that_follows_another_one_takes_fewer_steps() -> None:
    worker = engine({"late": alike(1)["r0"]})
    worker.batch.learn([SiblingRun("g", 1, "early", 0, pack_ids(alike(1)["r0"]))], [], worker.now)
    worker.run()
    assert worker.made == 200
    assert worker.steps < 60
    assert worker.batch.report["accepted"] > 130


def test_tokens_of_another_version_are_not_drafted_from() -> None:
    worker = engine({"late": alike(1)["r0"]})
    worker.batch.install(2)
    worker.batch.learn([SiblingRun("g", 1, "early", 0, pack_ids(alike(1)["r0"]))], [], worker.now)
    worker.run()
    assert worker.batch.report["accepted"] == 0


def test_drafts_end_where_they_do_not_pay() -> None:
    worker = engine(apart(8), base_s=1e-5, token_s=1e-3)
    worker.run()
    assert not worker.batch.report["speculating"]
    assert worker.batch.report["drafted"] < worker.made / 4


def test_drafts_end_where_the_search_for_them_takes_more_than_they_gain() -> None:
    searched = list[VerifyingWorker]()

    class SlowTree(PlainSuffixTree):
        def speculate(self, *args: Any) -> Any:
            searched[0].now += 0.05
            return super().speculate(*args)

    worker = VerifyingWorker(SlowTree, alike(4, 600), base_s=0.01, token_s=1e-4, now=100.0)
    searched.append(worker)
    worker.batch.learn([SiblingRun("g", 1, "early", 0, pack_ids(alike(1, 600)["r0"]))], [], worker.now)
    worker.run()
    assert not worker.batch.report["speculating"]
    assert worker.batch.report["drafted"] < worker.made / 4


def test_drafts_go_on_where_they_pay() -> None:
    worker = engine(alike(4))
    worker.batch.learn([SiblingRun("g", 1, "early", 0, pack_ids(alike(1)["r0"]))], [], worker.now)
    worker.run()
    assert worker.batch.report["speculating"]
    assert worker.steps < 70


def test_requests_without_a_group_or_room_or_with_barred_ends_are_not_drafted() -> None:
    changes: Sequence[dict[str, Any]] = [{"source": None}, {"room": 0}, {"fixed": True}]
    for change in changes:
        worker = engine(alike(2))
        worker.batch.learn([SiblingRun("g", 1, "early", 0, pack_ids(alike(1)["r0"]))], [], worker.now)
        for _ in range(20):
            worker.step(**change)
            assert worker.drafted == 0


def test_an_ended_group_leaves_nothing() -> None:
    worker = engine(alike(2))
    worker.run()
    assert worker.batch.report["tree_bytes"] > 0
    worker.batch.learn([], ["g"], worker.now)
    assert (worker.batch.report["tree_bytes"], worker.batch.report["groups"]) == (0, 0)
