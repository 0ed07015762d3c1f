"""Makes of a session's turns what can be trained on: sequences of tokens with a loss mask. Pure.

Each path with tokens that no later one repeats as a whole is a branch. Branches share tokens, as forks, retries and
compacted histories begin alike; a sampled token has mask 1 in exactly one of them, the first that has it. Text of
answers that a prompt has newly encoded has mask 0, and is counted: its sampled tokens have mask 1 where they were
sampled. Answers that nobody got belong to no branch.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from ebbtide.gateway.sessions.book import BookedTurn, SessionBook
from ebbtide.gateway.sessions.token_tree import PathKey, TokenPrefix
from ebbtide.types.tokens import TOKEN, TokenArray, pack_ids

#: Tokens of a page, each in its prompt, its completion and its branch. As JSON they take some 10 MB at most.
_PAGE_TOKENS: Final = 1 << 18
MaskArray = npt.NDArray[np.uint8]


class CompletionTrace(Struct, frozen=True, kw_only=True):
    """One completion: ids, logprobs in nats, and the policy version of each token."""

    rollout_id: str
    tokens: TokenArray
    delivered: bool


class TurnTrace(Struct, frozen=True, kw_only=True):
    """One turn. Arrays have one element per id of the prompt."""

    turn: BookedTurn
    parent: PathKey | None
    """The last completion of which the prompt has tokens as they were sampled."""
    prompt_ids: npt.NDArray[np.uint32]
    sampled: MaskArray
    """1: the id was sampled by an earlier turn, in this very context."""
    completions: tuple[CompletionTrace, ...]


class BranchTrace(Struct, frozen=True, kw_only=True):
    """One branch, from its first prompt to its last sampled token."""

    leaf: PathKey
    turns: tuple[int, ...]
    """The turns of which it has sampled tokens, in order."""
    prompt_ids: npt.NDArray[np.uint32]
    """All ids before the first that was sampled."""
    tokens: TokenArray
    """What follows it. Ids that were not sampled have logprob 0 and version 0."""
    loss_mask: MaskArray
    """One per token: 1 in exactly one branch if it was sampled, else 0."""
    sampled: MaskArray
    """One per token: 1 if it was sampled, whatever branch counts it."""
    rollouts: int
    """Completions of which no earlier branch has a token."""
    responses: dict[PathKey, tuple[int, int]]
    """Where in `tokens` those of each completion are: from the first completion to the last."""

    def packed(self) -> dict[str, bytes]:
        """The fields `prompt_ids`, `tokens` and `loss_mask` of a trajectory."""
        return {
            "prompt_ids": pack_ids(self.prompt_ids),
            "tokens": self.tokens.tobytes(),
            "loss_mask": self.loss_mask.tobytes(),
        }


class SessionTrace(Struct, frozen=True, kw_only=True):
    """A session as it was generated, or some turns of it in a row."""

    turns: tuple[TurnTrace, ...]
    branches: tuple[BranchTrace, ...]
    """Those that end in one of the turns."""
    unmatched: int
    """Sampled tokens that clients sent back as text which could not be matched, summed over all prompts."""
    unknown: int
    """Messages of the assistant that clients sent and no turn had answered, summed over all prompts."""
    until: int = 0
    """The last turn that counts: later ones change nothing here."""
    more: bool = False
    """Whether turns up to `until` follow."""


def session_trace(book: SessionBook) -> SessionTrace:
    """Makes the trace of all that the book knows. A completion without tokens belongs to no branch."""
    return _trace(book, 0, book.last, book.last)


def trace_page(book: SessionBook, after: int, most_turns: int, until: int = 0) -> SessionTrace:
    """Makes the trace of the turns after a number, as many as fit into a page, and at least of one. `until`: the last
    turn that counts; 0: the session's last one. Pages with one `until` join, whatever turns are added meanwhile. The
    counts of unmatched tokens and unknown answers are those of all turns up to it.
    """
    until = min(until or book.last, book.last)
    last, tokens = after, 0
    for number in sorted(book.turns):
        if not after < number <= until:
            continue
        paths = book.tree.completions(number)
        tokens += book.tree.prompt_length(number) + sum(map(book.tree.length, paths))
        if last > after and (number > after + most_turns or tokens > _PAGE_TOKENS):
            break
        last = number
    return _trace(book, after, last, until)


def _trace(book: SessionBook, after: int, last: int, until: int) -> SessionTrace:
    records = [turn.record for number, turn in book.turns.items() if number <= until]
    turns = [turn for number, turn in sorted(book.turns.items()) if after < number <= last]
    return SessionTrace(
        turns=tuple(_turn(book, turn) for turn in turns),
        branches=tuple(_branches(book, after, last, until)),
        unmatched=sum(record.unmatched for record in records),
        unknown=sum(record.unknown for record in records),
        until=until,
        more=last < until,
    )


def _turn(book: SessionBook, turn: BookedTurn) -> TurnTrace:
    prompt = book.tree.prompt(turn.number)
    spans = _spans(book, TokenPrefix(PathKey(turn.number), len(prompt)))
    completions = zip(turn.rollout_ids, book.tree.completions(turn.number), strict=True)
    return TurnTrace(
        turn=turn,
        parent=next(iter(spans), None),
        prompt_ids=prompt,
        sampled=_mask(len(prompt), spans),
        completions=tuple(_completion(book, one, key) for one, key in completions),
    )


def _completion(book: SessionBook, rollout_id: str, key: PathKey) -> CompletionTrace:
    return CompletionTrace(rollout_id=rollout_id, tokens=book.tokens(key), delivered=key not in book.undelivered)


def _branches(book: SessionBook, after: int, last: int, until: int) -> Iterator[BranchTrace]:
    """The branches of the turns up to `until` that end in a turn after `after`, and up to `last`."""
    tree = book.tree
    repeated = _repeated(book, until)
    counted: dict[PathKey, int] = {}
    for key in tree.paths():
        if key.turn > last:
            return
        if key in repeated or not _counts(book, key):
            continue
        spans = _spans(book, TokenPrefix(key, tree.length(key)))
        if key.turn > after:
            yield _branch(book, key, spans, counted)
        for one, (start, end) in spans.items():
            counted[one] = max(counted.get(one, 0), end - start)


def _repeated(book: SessionBook, until: int) -> set[PathKey]:
    """The paths that a later branch repeats as a whole.

    A turn that got no token, or whose answer nobody got, is no branch: so what it follows must stay one.
    """
    tree = book.tree
    reached: dict[PathKey, int] = {}  # how many ids of each path belong to later paths with tokens
    for number in sorted((one for one in book.turns if one <= until), reverse=True):
        parent = tree.parent(number)
        if parent.key is None:
            continue
        paths = list(tree.completions(number))
        sampled = any(_counts(book, key) for key in paths)
        used = parent.length if sampled else max(reached.get(key, 0) for key in paths)
        reached[parent.key] = max(reached.get(parent.key, 0), min(used, parent.length))
    return {key for key, length in reached.items() if length == tree.length(key)}


def _counts(book: SessionBook, key: PathKey) -> bool:
    """Whether a path ends in tokens that somebody got. If later prompts repeat some, these belong to their branches."""
    return len(book.tree.sampled(key)) > 0 and key not in book.undelivered


def _branch(
    book: SessionBook, leaf: PathKey, spans: dict[PathKey, tuple[int, int]], counted: Mapping[PathKey, int]
) -> BranchTrace:
    """Makes a branch. `counted`: how many tokens of each completion have mask 1 in earlier ones."""
    tree, whole = book.tree, TokenPrefix(leaf, book.tree.length(leaf))
    first = min(start for start, _ in spans.values())
    tokens = np.zeros(whole.length, dtype=TOKEN)
    tokens["id"] = tree.path(leaf)
    loss = np.zeros(whole.length, dtype=np.uint8)
    rollouts = len(spans.keys() - counted.keys())
    for key, (start, end) in spans.items():
        tokens[start:end] = book.tokens(key)[: end - start]
        loss[min(end, start + counted.get(key, 0)) : end] = 1
    return BranchTrace(
        leaf=leaf,
        turns=tuple(key.turn for key in spans)[::-1],
        prompt_ids=tokens["id"][:first],
        tokens=tokens[first:],
        loss_mask=loss[first:],
        sampled=_mask(whole.length, spans)[first:],
        rollouts=rollouts,
        responses={key: (start - first, end - first) for key, (start, end) in reversed(spans.items())},
    )


def _spans(book: SessionBook, prefix: TokenPrefix) -> dict[PathKey, tuple[int, int]]:
    """Where in a prefix the sampled tokens of which completion are: from the last completion to the first."""
    spans = {}
    for key, length in book.tree.chain(prefix):
        if length > (start := book.tree.prompt_length(key.turn)):
            spans[key] = (start, length)
    return spans


def _mask(length: int, spans: Mapping[Any, tuple[int, int]]) -> MaskArray:
    mask = np.zeros(length, dtype=np.uint8)
    for start, end in spans.values():
        mask[start:end] = 1
    return mask
