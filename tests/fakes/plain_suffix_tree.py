"""Finds stretches of tokens by looking at all of them: what ArcticInference's tree does fast."""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple


class PlainDraft(NamedTuple):
    token_ids: list[int]
    match_len: int


class PlainSuffixTree:
    """As `SuffixTree`; takes the longest match, and not the best score."""

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.sequences: dict[int, list[int]] = {}

    def extend(self, seq_id: int, tokens: Sequence[int]) -> None:
        self.sequences.setdefault(seq_id, []).extend(tokens)

    def speculate(
        self, context: Sequence[int], most: int, factor: float, offset: float, least: float, tree: bool
    ) -> PlainDraft:
        for match in range(min(len(context), self.depth) - 1, 0, -1):
            follows = self._following(list(context[-match:]))
            if follows:
                wanted, draft = list(context[-match:]), list[int]()
                while len(draft) < min(most, int(match * factor + offset)) and follows:
                    draft.append(Counter(follows).most_common(1)[0][0])
                    follows = self._following([*wanted, *draft])
                return PlainDraft(draft, match)
        return PlainDraft([], 0)

    def _following(self, stretch: list[int]) -> list[int]:
        size = len(stretch)
        return [
            tokens[at + size]
            for tokens in self.sequences.values()
            for at in range(len(tokens) - size)
            if tokens[at : at + size] == stretch
        ]
