"""Moves the cached blocks of texts that have ended to the front of vLLM's queue of free blocks.

Texts share the blocks of what they begin with: a system prompt, or the prompt of a group. A block is moved when the
last remembered text that has it ends.

Invariant: `_texts` has the end of each remembered text by its episode, the one noted last at the end, and `_links` the
blocks of all of them by their hashes, each once. Neither has more members than the pool has blocks. A link counts the
links behind it and the texts that end with it. A block is moved only while nobody uses it and it
still has the content that it had then. Lost with the engine's process: the order is vLLM's own.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any


class _Link:
    """One block of a text. `before`: the hash of the block before it, in the same group of layers."""

    __slots__ = ("before", "block", "needed")

    def __init__(self) -> None:
        self.block: Any = None
        self.before: Any = None
        self.needed = 0  # by so many links behind it and ends of texts


class EndedPrefixes:
    """`pool`: vLLM's block pool."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self._links: dict[Any, _Link] = {}
        self._texts: dict[str, list[Any]] = {}

    @property
    def remembered(self) -> int:
        """Blocks of all remembered texts, each once."""
        return len(self._links)

    def note(self, name: str, groups: Sequence[Sequence[Any]]) -> None:
        """Note the blocks of an episode's request that finishes, by groups of layers, in the order of its tokens. They
        take the place of those that were noted of the episode before.
        """
        ends = [end for blocks in groups if (end := self._chain(blocks)) is not None]
        self._let_go(name)
        if ends:
            self._texts[name] = ends
        most = self._pool.num_gpu_blocks
        while max(len(self._links), len(self._texts)) > most and len(self._texts) > 1:
            self._let_go(next(iter(self._texts)))

    def forget(self, name: str) -> None:
        """Have the blocks that only this text has be evicted first, the last ones of it before others.

        Unknown names are ignored.
        """
        gone = self._unlinked(self._texts.pop(name, ()))
        unused = [link.block for known, link in gone if not link.block.ref_cnt and link.block.block_hash == known]
        queue = self._pool.free_block_queue
        for block in unused:
            queue.remove(block)
        queue.prepend_n(unused)

    def _chain(self, blocks: Iterable[Any]) -> Any:
        """Link the cached ones of these blocks, and count the text's end. Returns its hash; None without blocks."""
        before: Any = None
        for block in blocks:
            known = block.block_hash
            if known is None:
                continue
            link = self._links.get(known)
            if link is None:
                link = self._links[known] = _Link()
            if link.before is None and before is not None:  # new, or the window of another text began with it
                link.before = before
                self._links[before].needed += 1
            link.block, before = block, known
        if before is not None:
            self._links[before].needed += 1
        return before

    def _let_go(self, name: str) -> None:
        for _ in self._unlinked(self._texts.pop(name, ())):
            pass

    def _unlinked(self, ends: Iterable[Any]) -> Iterator[tuple[Any, _Link]]:
        """Forget a text that ends so. Yields what no other one has, from each end on."""
        for end in ends:
            known = end
            while known is not None:
                link = self._links[known]
                link.needed -= 1
                if link.needed:
                    break
                del self._links[known]
                yield known, link
                known = link.before
