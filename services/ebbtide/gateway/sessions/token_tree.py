"""Keeps the token ids of a session's turns as a tree: what two paths have in common is there once.

A turn's prompt repeats the first ids of an earlier path and adds its own; each of its completions adds the sampled ids.
A path is a prompt with one completion.

Invariant: a turn's parent has a smaller number, and a prompt never repeats more than its parent's path has. Sampled ids
only grow. What is lost with the process: nothing; records and rollouts have all of it.
"""

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ebbtide.types.tokens import IdArray

_EMPTY: Final[IdArray] = np.empty(0, dtype=np.uint32)


class PathKey(NamedTuple):
    """One completion of one turn. Turns are numbered from 1 on, completions from 0 on."""

    turn: int
    completion: int = 0


class TokenPrefix(NamedTuple):
    """The first `length` ids of a path; of no path if there is no key, and then 0."""

    key: PathKey | None
    length: int


class _TurnIds:
    def __init__(self, parent: TokenPrefix, added: IdArray, completions: int) -> None:
        self.parent, self.added = parent, added
        self.sampled: list[IdArray] = [_EMPTY] * completions

    @property
    def prompt_length(self) -> int:
        return self.parent.length + len(self.added)


class TokenTree:
    """The ids of one session's turns."""

    def __init__(self) -> None:
        self._turns: dict[int, _TurnIds] = {}

    def add_turn(self, number: int, parent: TokenPrefix, added: npt.ArrayLike, *, completions: int) -> None:
        """Adds a turn. Raises `KeyError` if its parent is not there, `ValueError` if that is too short or later."""
        if parent.key is not None and (number <= parent.key.turn or parent.length > self.length(parent.key)):
            raise ValueError(f"turn {number} repeats {parent.length} ids of {parent.key}, which has fewer or is later")
        self._turns[number] = _TurnIds(parent, np.asarray(added, dtype=np.uint32), completions)

    def set_sampled(self, key: PathKey, ids: npt.ArrayLike) -> None:
        self._turns[key.turn].sampled[key.completion] = np.asarray(ids, dtype=np.uint32)

    def parent(self, turn: int) -> TokenPrefix:
        return self._turns[turn].parent

    def prompt_length(self, turn: int) -> int:
        return self._turns[turn].prompt_length

    def sampled(self, key: PathKey) -> IdArray:
        return self._turns[key.turn].sampled[key.completion]

    def length(self, key: PathKey) -> int:
        """The number of ids of a path."""
        return self.prompt_length(key.turn) + len(self.sampled(key))

    def paths(self) -> Iterator[PathKey]:
        """All paths, in the order of their turns."""
        for number in sorted(self._turns):
            yield from self.completions(number)

    def completions(self, turn: int) -> Iterator[PathKey]:
        """The paths of one turn."""
        yield from (PathKey(turn, index) for index in range(len(self._turns[turn].sampled)))

    def prompt(self, turn: int) -> IdArray:
        """The ids of a turn's prompt."""
        return self.prefix(TokenPrefix(PathKey(turn), self.prompt_length(turn)))

    def path(self, key: PathKey) -> IdArray:
        """The ids of a turn's prompt and of one completion."""
        return self.prefix(TokenPrefix(key, self.length(key)))

    def prefix(self, prefix: TokenPrefix) -> IdArray:
        parts = []
        for key, length in self.chain(prefix):
            turn = self._turns[key.turn]
            parts.append(turn.sampled[key.completion][: max(0, length - turn.prompt_length)])
            parts.append(turn.added[: length - turn.parent.length])
        return np.concatenate(parts[::-1]) if parts else _EMPTY

    def chain(self, prefix: TokenPrefix) -> Iterator[tuple[PathKey, int]]:
        """Yields path and length of the prefix, and of each earlier path as much as it repeats: last to first."""
        key, length = prefix
        while key is not None:
            parent = self._turns[key.turn].parent
            # A prefix that ends within what its turn repeats is one of the earlier path.
            if length > parent.length:
                yield key, length
            key, length = parent.key, min(parent.length, length)

    def longest_prefix(self, ids: Sequence[int] | IdArray) -> TokenPrefix:
        """Returns the longest prefix of any path that `ids` begin with; of equal ones, the earliest."""
        wanted = np.asarray(ids, dtype=np.uint32)
        best, matched = TokenPrefix(None, 0), dict[PathKey, int]()
        for number, turn in sorted(self._turns.items()):
            found = matched[turn.parent.key] if turn.parent.key else 0
            if found >= turn.parent.length:
                found = turn.parent.length + _common(wanted[turn.parent.length :], turn.added)
            for index, sampled in enumerate(turn.sampled):
                key, length = PathKey(number, index), found
                if length == turn.prompt_length:
                    length += _common(wanted[length:], sampled)
                matched[key] = length
                if length > best.length:
                    best = TokenPrefix(key, length)
        return best


def _common(left: IdArray, right: IdArray) -> int:
    """How many ids both begin with."""
    length = min(len(left), len(right))
    different = np.flatnonzero(left[:length] != right[:length])
    return int(different[0]) if len(different) else length
