"""Moves the cached blocks of texts that have ended to the front of vLLM's queue of free blocks.

Invariant: `_left` has the cached blocks of the last finished requests, by the name that their turn gave them. A block
is moved only while nobody uses it and it still has the content that it had then. Lost with the engine's process: the
order is vLLM's own.
"""

from collections.abc import Sequence
from typing import Any, Final

#: Finished requests whose blocks are remembered: more than the sessions that a worker's cache holds.
_REMEMBERED: Final = 4096


class EndedPrefixes:
    """`pool`: vLLM's block pool."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self._left: dict[str, list[tuple[Any, Any]]] = {}

    def note(self, name: str, groups: Sequence[Sequence[Any]]) -> None:
        """Note the blocks of a request that finishes, by groups of layers, in the order of its tokens."""
        self._left.pop(name, None)
        self._left[name] = [
            (block, block.block_hash) for blocks in groups for block in reversed(blocks) if block.block_hash is not None
        ]
        if len(self._left) > _REMEMBERED:
            del self._left[next(iter(self._left))]

    def forget(self, name: str) -> None:
        """Have the blocks of a request, and all before it, be evicted first, the last ones of its text before others.

        Unknown names are ignored.
        """
        queue = self._pool.free_block_queue
        unused = [block for block, known in self._left.pop(name, ()) if not block.ref_cnt and block.block_hash == known]
        for block in unused:
            queue.remove(block)
        queue.prepend_n(unused)
