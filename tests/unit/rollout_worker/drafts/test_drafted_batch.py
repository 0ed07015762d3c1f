"""A batch of requests is drafted from its groups, step after step; drafts that do not pay end."""

from collections.abc import Sequence
from random import Random
from typing import Any

from ebbtide.rollout_worker.engine import DraftSource, SiblingRun
from ebbtide.rollout_worker.engine.vllm.drafts.drafted_batch import BatchRow, DraftedBatch
from ebbtide.types.tokens import pack_ids
from tests.fakes.plain_suffix_tree import PlainSuffixTree

PROMPT = [1, 2, 3]


class DraftedEngine:
    """Verifies drafts for responses that are known beforehand. A step takes `base_s`, and `token_s` for each token."""

    def __init__(self, responses: dict[str, list[int]], *, base_s: float = 0.01, token_s: float = 1e-4) -> None:
        self.batch = DraftedBatch(PlainSuffixTree, longest=8, most=512, most_bytes=1 << 24)
        self.batch.install(1)
        self._responses, self._base_s, self._token_s = responses, base_s, token_s
        self._at = dict.fromkeys(responses, 0)
        self._drafts: dict[str, list[int]] = {}
        self.now = 100.0
        self.steps = 0
        self.made = 0

    def step(self, **changes: Any) -> None:
        names = [name for name in self._responses if self._at[name] < len(self._responses[name])]
        tokens = len(names) + sum(len(self._drafts.get(name, ())) for name in names)
        self.now += self._base_s + self._token_s * tokens
        rows = [self._row(name, changes) for name in names]
        drafts = self.batch.step(rows, self.now, lambda: self.now)
        self._drafts = dict(zip(names, drafts, strict=True))
        self.steps += 1

    def run(self) -> None:
        while any(self._at[name] < len(response) for name, response in self._responses.items()):
            self.step()

    def _row(self, name: str, changes: dict[str, Any]) -> BatchRow:
        response, at = self._responses[name], self._at[name]
        draft = self._drafts.get(name, [])
        accepted = next((n for n, token in enumerate(draft) if response[at + n : at + n + 1] != [token]), len(draft))
        made = min(accepted + 1, len(response) - at)
        self._at[name] = at + made
        self.made += made
        text = PROMPT + response[: at + made]
        row = BatchRow(
            name=name,
            source=DraftSource(group="g", rollout_id=name, made=0),
            prompt=len(PROMPT),
            tokens=lambda first, last: text[first:last],
            length=len(text),
            made=made,
            room=len(response) - at - made - 1,
        )
        return row._replace(**changes)

    def drafted(self) -> int:
        return sum(map(len, self._drafts.values()))


def alike(members: int, length: int = 200) -> dict[str, list[int]]:
    draw = Random(1)
    text = [draw.randrange(4, 1_000_000) for _ in range(length)]
    return {f"r{number}": text for number in range(members)}


def apart(members: int, length: int = 400) -> dict[str, list[int]]:
    """Few different tokens, in no order: short stretches are found, and what follows is a guess."""
    return {f"r{n}": [Random(f"{n} {at}").randrange(4, 12) for at in range(length)] for n in range(members)}


def test_a_member_that_follows_another_one_takes_fewer_steps() -> None:
    engine = DraftedEngine({"late": alike(1)["r0"]})
    engine.batch.learn([SiblingRun("g", 1, "early", 0, pack_ids(alike(1)["r0"]))], [], engine.now)
    engine.run()
    assert engine.made == 200
    assert engine.steps < 60
    assert engine.batch.report["accepted"] > 130


def test_tokens_of_another_version_are_not_drafted_from() -> None:
    engine = DraftedEngine({"late": alike(1)["r0"]})
    engine.batch.install(2)
    engine.batch.learn([SiblingRun("g", 1, "early", 0, pack_ids(alike(1)["r0"]))], [], engine.now)
    engine.run()
    assert engine.batch.report["accepted"] == 0


def test_drafts_end_where_they_do_not_pay() -> None:
    engine = DraftedEngine(apart(8), base_s=1e-5, token_s=1e-3)
    engine.run()
    assert not engine.batch.report["speculating"]
    assert engine.batch.report["drafted"] < engine.made / 4


def test_drafts_go_on_where_they_pay() -> None:
    engine = DraftedEngine(alike(4))
    engine.batch.learn([SiblingRun("g", 1, "early", 0, pack_ids(alike(1)["r0"]))], [], engine.now)
    engine.run()
    assert engine.batch.report["speculating"]
    assert engine.steps < 70


def test_requests_without_a_group_or_room_or_with_barred_ends_are_not_drafted() -> None:
    changes: Sequence[dict[str, Any]] = [{"source": None}, {"room": 0}, {"fixed": True}]
    for change in changes:
        engine = DraftedEngine(alike(2))
        engine.batch.learn([SiblingRun("g", 1, "early", 0, pack_ids(alike(1)["r0"]))], [], engine.now)
        for _ in range(20):
            engine.step(**change)
            assert engine.drafted() == 0


def test_an_ended_group_leaves_nothing() -> None:
    engine = DraftedEngine(alike(2))
    engine.run()
    assert engine.batch.report["tree_bytes"] > 0
    engine.batch.learn([], ["g"], engine.now)
    assert (engine.batch.report["tree_bytes"], engine.batch.report["groups"]) == (0, 0)
