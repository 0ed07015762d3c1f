"""Models a pool that keeps the keys and values of rollouts that stopped, beyond any engine's memory.

Seer's is in the memory and on the disks of all hosts (arXiv 2511.14617). A rollout that goes
on, wherever, has them copied and reads nothing again. The pool is taken to be large enough: Seer's use stayed below
half of its memory.
"""

from msgspec import Struct


class KvPool(Struct, frozen=True, kw_only=True):
    tokens_per_s: float  # that one copy moves
    begin_s: float = 0.01  # until the first of them comes

    def copy_s(self, tokens: int) -> float:
        """Seconds until an engine has the keys and values of so many tokens."""
        return self.begin_s + tokens / self.tokens_per_s
