"""Drafts tokens of requests from what their groups made, step after step, and counts what became of them.

This module knows no vLLM, and drafts never decide what is generated: they are verified.

The trees are those of ArcticInference (suffix decoding, arXiv 2411.04975, section 3): every stretch of at most `DEPTH`
tokens is found from its begin, with how often each continuation came. A response is one sequence of its tree. Where
tokens are missing, it goes on as another sequence, so that no stretch spans the gap.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, Protocol, TypedDict

from ebbtide.rollout_worker.engine import DraftSource

#: Longest stretch that is found. Deeper trees find no more drafts, and cost more for each token.
DEPTH: Final = 24
#: Memory of a token in a tree of that depth: 270 to 310 bytes were measured.
TOKEN_BYTES: Final = 310
#: A group without requests for so long has ended, or is generated elsewhere.
IDLE_S: Final = 60.0
#: A draft has at most twice the tokens of its match, and one: short matches tell little.
_FACTOR, _OFFSET = 2.0, 1.0
#: Tokens less probable than this, by their counts, are not drafted.
_LEAST: Final = 0.1
#: Tokens of a prompt that are learnt, the last ones: it is read once for each group.
_PROMPT: Final = 4_096
#: The name of a group's prompt among its responses.
_PROMPT_NAME: Final = ""


class SuffixTree(Protocol):
    """What is used of ArcticInference's tree."""

    def extend(self, seq_id: int, tokens: Sequence[int], /) -> None: ...

    def speculate(
        self,
        context: Sequence[int],
        max_spec_tokens: int,
        max_spec_factor: float,
        max_spec_offset: float,
        min_token_prob: float,
        use_tree_spec: bool,
        /,
    ) -> Any: ...


class _GroupTree:
    def __init__(self, tree: SuffixTree) -> None:
        self.tree = tree
        self.used = 0.0
        self.tokens = 0
        self.sequences = 0
        self.responses: dict[str, tuple[int, int]] = {}  # its newest sequence, and the end of what is known


class GroupTrees:
    """A suffix tree for each group: what its members made here, for drafts of the others.

    Invariant: `_trees` has the tree used longest ago first. Their tokens weigh at most `most_bytes` in all, by what a
    token is known to take; beyond that whole trees go, the one used longest ago first, and at last the one in use. A
    tree goes after `IDLE_S` without use, and all go when another version generates. Lost with the engine's process: new
    tokens fill trees again.
    """

    def __init__(self, make: Callable[[int], SuffixTree], most_bytes: int) -> None:
        """`make`: a tree of a depth."""
        self._make, self._most = make, most_bytes // TOKEN_BYTES
        self._trees: OrderedDict[str, _GroupTree] = OrderedDict()
        self._tokens = 0

    @property
    def bytes(self) -> int:
        """What all trees take, by `TOKEN_BYTES`."""
        return self._tokens * TOKEN_BYTES

    def __len__(self) -> int:
        return len(self._trees)

    def __contains__(self, group: str) -> bool:
        return group in self._trees

    def add(self, group: str, response: str, offset: int, ids: Sequence[int], now: float) -> None:
        """Add tokens of a response, from its token `offset` on. Known ones are ignored."""
        held = self._use(group, now)
        sequence, end = held.responses.get(response, (-1, 0))
        if offset + len(ids) <= end and sequence >= 0:
            return
        if sequence < 0 or offset > end:
            sequence, end = held.sequences, offset
            held.sequences += 1
        fresh = ids[end - offset :]
        held.tree.extend(sequence, fresh)
        held.responses[response] = sequence, end + len(fresh)
        held.tokens += len(fresh)
        self._tokens += len(fresh)
        while self._tokens > self._most:  # a tree that weighs more by itself begins anew, too
            self._drop(next(iter(self._trees)))

    def find(self, group: str, context: Sequence[int], longest: int, now: float) -> list[int]:
        """The most probable continuation of a context, of whose tokens the last `DEPTH` count; empty without one."""
        if group not in self._trees:
            return []
        found = self._use(group, now).tree.speculate(context[-DEPTH:], longest, _FACTOR, _OFFSET, _LEAST, False)
        return list(found.token_ids)

    def expire(self, now: float) -> None:
        """Give back trees that are out of use."""
        while self._trees:
            group, held = next(iter(self._trees.items()))
            if now - held.used <= IDLE_S:
                return
            self._drop(group)

    def clear(self) -> None:
        """Give back all trees."""
        self._trees.clear()
        self._tokens = 0

    def _use(self, group: str, now: float) -> _GroupTree:
        held = self._trees.get(group)
        if held is None:
            held = self._trees[group] = _GroupTree(self._make(DEPTH))
        held.used = now
        self._trees.move_to_end(group)
        return held

    def _drop(self, group: str) -> None:
        self._tokens -= self._trees.pop(group).tokens


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
    """Drafts for the requests of one engine process.

    Invariant: `_drafted` has the requests of the newest step; a request that is missing in a step is forgotten. What
    came before its first step here, as of a rollout that was moved, enters its group's tree then.
    """

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
