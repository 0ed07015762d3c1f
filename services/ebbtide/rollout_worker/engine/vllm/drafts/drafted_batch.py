"""Drafts for a batch of requests, step after step, and learns from what became of the drafts. Knows no vLLM.

Invariant: `_rows` has the requests of the newest step; a request that is missing in a step is forgotten. What came
before its first step here enters its group's tree then. Drafts never decide what is generated: they are verified.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Final, NamedTuple, TypedDict

from ebbtide.rollout_worker.engine import DraftSource, SiblingRun
from ebbtide.rollout_worker.engine.vllm.drafts.group_trees import DEPTH, GroupTrees, SuffixTree
from ebbtide.scheduling.long_tail.drafts.draft_planner import DraftOffer, DraftPlanner
from ebbtide.scheduling.long_tail.drafts.speculation_switch import SpeculationMode
from ebbtide.types.tokens import unpack_ids

#: Tokens of a prompt that are learnt, the last ones: it is read once for each group.
_PROMPT: Final = 4_096
#: The name of a group's prompt among its responses.
_PROMPT_NAME: Final = ""


class DraftReport(TypedDict):
    """What drafts came to so far, in this engine's process."""

    drafts: int
    drafted: int  # tokens
    accepted: int
    speculating: bool
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


class _Drafted(NamedTuple):
    group: str
    match: int
    length: int


class DraftedBatch:
    def __init__(self, make: Callable[[int], SuffixTree], *, longest: int, most: int, most_bytes: int) -> None:
        """`longest`: tokens of a draft; `most`: of all in a step; `most_bytes`: of all trees."""
        self._trees, self._planner = GroupTrees(make, most_bytes), DraftPlanner(longest, most)
        self._longest = longest
        self._version = 0
        self._rows: dict[str, _Drafted | None] = {}
        self._began = 0.0  # when the newest step's tokens were there
        self._searched_s = 0.0  # from then on, for the search for drafts
        self.report: DraftReport = DraftReport(
            drafts=0, drafted=0, accepted=0, speculating=True, tree_bytes=0, groups=0
        )

    def learn(self, runs: Iterable[SiblingRun], ended: Collection[str], now: float) -> None:
        """Add tokens of responses that others make, and forget groups that have ended."""
        self._trees.forget(ended)
        self._planner.forget(ended)
        for run in runs:
            if run.version >= self._version:  # a later version comes here, too
                ids = unpack_ids(run.ids).tolist()
                self._trees.add(run.group, run.version, run.rollout_id, run.offset, ids, now)
        self._tell()

    def install(self, version: int) -> None:
        """From now on `version` generates. The same number again is another run's: nothing stays."""
        self._planner.forget(self._trees.replace(0 if version == self._version else version))
        self._version = version
        self._rows.clear()
        self._tell()

    def step(self, rows: Sequence[BatchRow], began: float, clock: Callable[[], float]) -> list[list[int]]:
        """Drafts for the step after this one, in the rows' order. `began`: when this step's tokens were there."""
        self._judge(rows, began)
        for row in rows:
            self._feed(row, began)
        self._planner.forget(self._trees.expire(began))
        drafts: list[list[int]] = [[] for _ in rows]
        chosen: dict[str, _Drafted | None] = {row.name: None for row in rows if row.made}
        if chosen and self._planner.looks():
            before = clock()
            self._draft(rows, drafts, chosen, began)
            self._searched_s = clock() - before
            self._planner.searched(self._searched_s)
        self._rows = chosen
        self._tell()
        return drafts

    def _judge(self, rows: Sequence[BatchRow], began: float) -> None:
        """Learn from how far the newest drafts were accepted, and how long the step took."""
        verified, whole = 0, len(self._rows) == len(rows) > 0
        for row in rows:
            whole = whole and row.name in self._rows and row.made > 0
            drafted = self._rows.get(row.name)
            verified += 1 + (drafted.length if drafted else 0)
            if drafted is None or not row.made:
                continue
            accepted = min(row.made - 1, drafted.length)
            self._planner.drafted(drafted.group, drafted.match, drafted.length, accepted)
            self.report["drafts"] += 1
            self.report["drafted"] += drafted.length
            self.report["accepted"] += accepted
        if whole and self._began:
            self._planner.stepped(verified, began - self._began - self._searched_s)
        self._began, self._searched_s = began, 0.0

    def _feed(self, row: BatchRow, now: float) -> None:
        if row.source is None or not row.made:
            return
        group, before = row.source.group, row.prompt - row.source.made
        if not self._trees.known(group, self._version, _PROMPT_NAME):
            first = max(0, before - _PROMPT)
            self._trees.add(group, self._version, _PROMPT_NAME, 0, row.tokens(first, before), now)
        first = row.length - row.made if row.name in self._rows else before
        ids = row.tokens(first, row.length)
        self._trees.add(group, self._version, row.source.rollout_id, first - before, ids, now)

    def _draft(
        self, rows: Sequence[BatchRow], drafts: list[list[int]], chosen: dict[str, _Drafted | None], now: float
    ) -> None:
        found = list[tuple[int, DraftOffer, list[int]]]()
        for place, row in enumerate(rows):
            if row.source is None or not row.made or row.fixed or row.room < 1:
                continue
            context = row.tokens(max(0, row.length - DEPTH), row.length)
            draft = self._trees.find(row.source.group, self._version, context, min(self._longest, row.room), now)
            if draft is not None:
                offer = DraftOffer(row.source.group, draft.match, len(draft.ids))
                found.append((place, offer, draft.ids))
        lengths = self._planner.lengths([offer for _, offer, _ in found], len(chosen))
        for (place, offer, ids), length in zip(found, lengths, strict=True):
            if length:
                drafts[place] = ids[:length]
                chosen[rows[place].name] = _Drafted(offer.group, offer.match, length)

    def _tell(self) -> None:
        self.report["speculating"] = self._planner.mode is SpeculationMode.ON
        self.report["tree_bytes"], self.report["groups"] = self._trees.bytes, len(self._trees)
