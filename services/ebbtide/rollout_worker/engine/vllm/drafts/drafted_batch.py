"""Drafts for a batch of requests, step after step, and counts what became of the drafts. Knows no vLLM.

Invariant: `_drafted` has the requests of the newest step; a request that is missing in a step is forgotten. What came
before its first step here, as of a rollout that was moved, enters its group's tree then. Drafts never decide what is
generated: they are verified.
"""

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, TypedDict

from ebbtide.rollout_worker.engine import DraftSource
from ebbtide.rollout_worker.engine.vllm.drafts.group_trees import DEPTH, GroupTrees, SuffixTree

#: Tokens of a prompt that are learnt, the last ones: it is read once for each group.
_PROMPT: Final = 4_096
#: The name of a group's prompt among its responses.
_PROMPT_NAME: Final = ""


class DraftReport(TypedDict):
    """What drafts came to so far, in this engine's process."""

    drafts: int
    drafted: int  # tokens
    accepted: int
    tree_bytes: int
    groups: int


class BatchRow(NamedTuple):
    """A request in a step. `tokens`: reads the tokens [first, last) of prompt and response.

    `length`: of them, the newest included; `made`: by this step, none while its prompt is read. `room`: tokens that
    may follow, the one that verification adds not counted. `source`: None if nothing may be drafted.
    """

    name: str
    source: DraftSource | None
    prompt: int  # tokens of the prompt, of which the last `source.made` are response
    tokens: Callable[[int, int], list[int]]
    length: int
    made: int
    room: int
    fixed: bool = False  # its next tokens are not drafted: `min_tokens` bars some of them


class DraftedBatch:
    def __init__(self, make: Callable[[int], SuffixTree], *, longest: int, most: int, most_bytes: int) -> None:
        """`longest`: tokens of a draft; `most`: of all in a step; `most_bytes`: of all trees."""
        self._trees = GroupTrees(make, most_bytes)
        self._longest, self._most = longest, most
        self._drafted: dict[str, int] = {}  # tokens of a request's newest draft
        self.report: DraftReport = DraftReport(drafts=0, drafted=0, accepted=0, tree_bytes=0, groups=0)

    def install(self) -> None:
        """Other weights generate from now on: what has ended is not drafted from any more. What runs enters anew."""
        self._trees.clear()
        self._drafted.clear()
        self._tell()

    def step(self, rows: Sequence[BatchRow], now: float) -> list[list[int]]:
        """Drafts for the step after this one, in the rows' order."""
        for row in rows:
            self._count(row)
            self._feed(row, now)
        self._trees.expire(now)
        longest = min(self._longest, self._most // max(1, len(rows)))
        drafts = [self._draft(row, longest, now) for row in rows]
        self._drafted = {row.name: len(draft) for row, draft in zip(rows, drafts, strict=True) if row.made}
        self._tell()
        return drafts

    def _count(self, row: BatchRow) -> None:
        """Note how far its newest draft was accepted."""
        drafted = self._drafted.get(row.name, 0)
        if drafted and row.made:
            self.report["drafts"] += 1
            self.report["drafted"] += drafted
            self.report["accepted"] += min(row.made - 1, drafted)

    def _feed(self, row: BatchRow, now: float) -> None:
        if row.source is None or not row.made:
            return
        group, before = row.source.group, row.prompt - row.source.made
        if group not in self._trees:
            self._trees.add(group, _PROMPT_NAME, 0, row.tokens(max(0, before - _PROMPT), before), now)
        first = row.length - row.made if row.name in self._drafted else before
        self._trees.add(group, row.source.rollout_id, first - before, row.tokens(first, row.length), now)

    def _draft(self, row: BatchRow, longest: int, now: float) -> list[int]:
        longest = min(longest, row.room)
        if row.source is None or not row.made or row.fixed or longest < 1:
            return []
        context = row.tokens(max(0, row.length - DEPTH), row.length)
        return self._trees.find(row.source.group, context, longest, now)

    def _tell(self) -> None:
        self.report["tree_bytes"], self.report["groups"] = self._trees.bytes, len(self._trees)
