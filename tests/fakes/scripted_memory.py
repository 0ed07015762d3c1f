"""Gives scripted requests memory for keys and values as vLLM does: as they come, and back from the youngest when full.

Invariant: `_inside` has the requests with memory, the oldest first. A single one may have more than there is.
"""

from collections.abc import Iterable, Sequence
from typing import Generic, Protocol, TypeVar


class MemoryUser(Protocol):
    @property
    def context(self) -> int:
        """Tokens of prompt and response so far."""
        ...


User = TypeVar("User", bound=MemoryUser)


class ScriptedMemory(Generic[User]):
    def __init__(self, kv_tokens: int, block: int) -> None:
        """`kv_tokens`: that fit; 0: all."""
        self._blocks, self._block = kv_tokens // block, block
        self._inside: list[User] = []
        self.preemptions = 0

    def fit(self, wanted: Sequence[User]) -> list[User]:
        """Those of `wanted`, in the order of their arrival, that have memory for another token."""
        if not self._blocks:
            return list(wanted)
        present = set(map(id, wanted))
        self._inside = [user for user in self._inside if id(user) in present]
        preempted = False
        while len(self._inside) > 1 and self._needed(self._inside) > self._blocks:
            self._inside.pop()
            self.preemptions += 1
            preempted = True
        if not preempted:
            self._enter(wanted)
        return list(self._inside)

    def _enter(self, wanted: Iterable[User]) -> None:
        inside = set(map(id, self._inside))
        for user in wanted:
            if id(user) in inside:
                continue
            if self._inside and self._needed([*self._inside, user]) > self._blocks:
                return
            self._inside.append(user)

    def _needed(self, users: Iterable[User]) -> int:
        return sum(-(-(user.context + 1) // self._block) for user in users)
