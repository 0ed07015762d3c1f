"""Keeps a suffix tree for each group: what its members made here, for drafts of the others.

The trees are those of ArcticInference (suffix decoding, arXiv 2411.04975, section 3): every stretch of at most `DEPTH`
tokens is found from its begin, with how often each continuation came. A response is one sequence of its tree. Where
tokens are missing, it goes on as another sequence, so that no stretch spans the gap.

Invariant: `_trees` has the tree used longest ago first. Their tokens weigh at most `most_bytes` in all, by what a token
is known to take; beyond that whole trees go, the one used longest ago first, and at last the one in use. A tree goes
after `IDLE_S` without use, and all go when another version generates. Lost with the engine's process: new tokens fill
trees again.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

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
