"""Siblings' tokens reach an engine that speculates, gathered; others are spared them."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from ebbtide.rollout_worker.engine import SiblingRun
from ebbtide.rollout_worker.generation.sibling_tokens import SiblingTokens
from ebbtide.types.tokens import pack_ids
from tests.support.waiting import wait_until


class LearningEngine:
    def __init__(self, *, speculates: bool = True) -> None:
        self.speculates = speculates
        self.told: list[tuple[Sequence[SiblingRun], Sequence[str]]] = []

    def learn_siblings(self, runs: Sequence[SiblingRun], ended: Sequence[str] = ()) -> None:
        self.told.append((list(runs), list(ended)))


def siblings(engine: Any) -> SiblingTokens:
    attempts: Any = SimpleNamespace(drafted_groups=frozenset({"g"}))
    return SiblingTokens(engine, attempts)


async def test_news_are_handed_over_together() -> None:
    engine = LearningEngine()
    kept = siblings(engine)
    kept.add("g", 1, "r", 0, [5, 6])
    kept.add("g", 1, "r", 2, [7])
    await wait_until(lambda: engine.told)
    runs = [SiblingRun("g", 1, "r", 0, pack_ids([5, 6])), SiblingRun("g", 1, "r", 2, pack_ids([7]))]
    assert engine.told == [(runs, [])]


async def test_an_ended_group_takes_its_waiting_news_along() -> None:
    engine = LearningEngine()
    kept = siblings(engine)
    kept.add("g", 1, "r", 0, [5, 6])
    kept.end("g")
    await wait_until(lambda: engine.told)
    assert engine.told == [([], ["g"])]


async def test_an_engine_that_does_not_speculate_needs_no_group() -> None:
    engine = LearningEngine(speculates=False)
    kept = siblings(engine)
    kept.add("g", 1, "r", 0, [5, 6])
    kept.end("g")
    assert kept.groups_held() == frozenset()
    assert siblings(LearningEngine()).groups_held() == {"g"}
    assert engine.told == []
