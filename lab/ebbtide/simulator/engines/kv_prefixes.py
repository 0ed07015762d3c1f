"""Keeps the blocks of keys and values of one engine: those in use, and those of known tokens that nobody uses.

Blocks are counted, not listed. A chain of prefixes stands for the blocks that a sequence shares with others: its prompt
with the samples of its group, all of it with its own next try or with the next turn of its episode. As in vLLM, unused
blocks stay until their memory is needed: the longest unused first, and of one chain its end first.

Invariant: `used` counts blocks of running sequences and of the prefixes that they hold, each once. A prefix in
`_unused` has no holder, and its descendants stand before it there. `_texts` has the last part of each text that stopped
and has not ended, the one that stopped last at the end; at most as many texts as there are blocks.
"""

from collections import OrderedDict
from typing import Final

from ebbtide.simulator.engines.engine_profile import KvCapacity


class KvPrefix:
    """Whole blocks of known tokens: `blocks` of them behind the first `start` blocks of `parent`'s chain."""

    __slots__ = ("aliases", "blocks", "holders", "name", "parent", "salt", "shared", "start", "texts")

    def __init__(self, name: str, parent: "KvPrefix | None", start: int, salt: int, *, shared: bool) -> None:
        self.name, self.parent, self.start, self.salt, self.shared = name, parent, start, salt, shared
        self.blocks = self.holders = 0
        self.aliases: list[str] = []  # names of further parts behind it, which are gone
        self.texts: set[str] = set()  # that have it, of those that stopped and have not ended

    @property
    def end(self) -> int:
        """Blocks of the chain up to the end of this part."""
        return self.start + self.blocks


class KvPrefixes:
    def __init__(self, capacity: KvCapacity) -> None:
        self.block: Final = capacity.block
        self.total: Final = capacity.tokens // capacity.block
        self.used = 0
        self.salt = 0  # of the present weights: only what they made is found
        self.caching: Final = capacity.prefix_cache
        self._named: dict[str, KvPrefix] = {}
        self._unused: OrderedDict[KvPrefix, None] = OrderedDict()
        self._texts: dict[str, KvPrefix] = {}
        self._cached = 0  # blocks in `_unused`

    @property
    def free(self) -> int:
        """Blocks that may be taken, those of unused prefixes included."""
        return self.total - self.used

    def blocks_of(self, tokens: int) -> int:
        return -(-tokens // self.block)

    def take(self, blocks: int) -> None:
        """Uses so many more of the free blocks."""
        self.used += blocks
        self._evict(self.used + self._cached - self.total)

    def find(self, name: str, most: int) -> KvPrefix | None:
        """What is known under a name, at most so many blocks; None: nothing. It is used whole, so an unused one that is
        longer is cut."""
        prefix = self._named.get(name)
        while prefix is not None and prefix.end > most:
            if not prefix.holders and prefix.start < most:
                self._cached -= prefix.end - most
                prefix.blocks = most - prefix.start
            else:
                prefix = prefix.parent
        return prefix

    def unused_in(self, prefix: KvPrefix | None) -> int:
        """Blocks that holding the prefix would take from the free ones."""
        blocks = 0
        while prefix is not None and not prefix.holders:
            blocks, prefix = blocks + prefix.blocks, prefix.parent
        return blocks

    def hold(self, prefix: KvPrefix) -> None:
        """Keeps the prefix and all before it from eviction until `let_go`."""
        part: KvPrefix | None = prefix
        while part is not None:
            if not part.holders and part in self._unused:
                del self._unused[part]
                self._cached -= part.blocks
                self.used += part.blocks
            part.holders += 1
            part = part.parent

    def let_go(self, prefix: KvPrefix | None) -> None:
        while prefix is not None:
            prefix.holders -= 1
            if not prefix.holders:
                self.used -= prefix.blocks
                self._keep(prefix)
            prefix = prefix.parent

    def begin(self, name: str) -> KvPrefix:
        """A new prefix without blocks, for others to share, whose reader adds blocks to it."""
        self._named[name] = prefix = KvPrefix(name, None, 0, self.salt, shared=True)
        return prefix

    def split_off(self, parent: KvPrefix, name: str) -> KvPrefix:
        """The holder's own block behind `parent`'s becomes a part for others to share; the holder has it as well."""
        self._named[name] = tail = KvPrefix(name, parent, parent.end, self.salt, shared=True)
        tail.blocks = tail.holders = 1
        return tail

    def knows(self, name: str) -> bool:
        return name in self._named

    def release(
        self, name: str, parent: KvPrefix | None, start: int, tokens: int, salt: int, *, text: str = ""
    ) -> None:
        """A sequence stops: of its `tokens` the whole blocks behind the first `start`, which are `parent`'s, remain
        known under its name if the present weights made them. `text`: what it is a part of; by default its name."""
        self.used -= self.blocks_of(tokens) - start
        whole = tokens // self.block - start
        if (whole or parent is not None) and self.caching and salt == self.salt:
            if parent is not None and parent.name == name and parent.holders == 1 and parent.end == start:
                parent.blocks += whole
                self.used += whole  # until it is let go
                self._note(text or name, parent)
            else:
                own = KvPrefix(name, parent, start, salt, shared=False)
                own.blocks = whole
                self._named[name] = own
                self._keep(own)
                self._note(text or name, own)
        self.let_go(parent)

    def end(self, text: str) -> None:
        """No sequence will begin with this text: what only it has is evicted first."""
        ended = [part for part in self._forgotten(text) if part in self._unused and not part.texts]
        for part in reversed(ended):
            self._unused.move_to_end(part, last=False)

    def forget(self) -> None:
        """The weights change: what is known helps no new sequence. Sequences keep what they hold."""
        self.salt += 1
        self._named.clear()
        self._unused.clear()
        self._texts.clear()
        self._cached = 0

    def _keep(self, prefix: KvPrefix) -> None:
        """Nobody holds it any more: it stays known as long as memory is left."""
        if prefix.salt != self.salt:
            return
        if prefix.blocks or prefix.parent is not None:
            self._unused[prefix] = None
            self._cached += prefix.blocks
        else:
            self._unname(prefix)

    def _note(self, text: str, last: KvPrefix) -> None:
        self._forgotten(text)
        self._texts[text] = last
        for part in _chain(last):
            part.texts.add(text)
        if len(self._texts) > self.total:
            self._forgotten(next(iter(self._texts)))

    def _forgotten(self, text: str) -> list[KvPrefix]:
        """The parts that a text had, the last one first."""
        parts = _chain(self._texts.pop(text, None))
        for part in parts:
            part.texts.discard(text)
        return parts

    def _evict(self, blocks: int) -> None:
        while blocks > 0:
            prefix = next(iter(self._unused))
            gone = min(blocks, prefix.blocks)
            prefix.blocks -= gone
            self._cached -= gone
            blocks -= gone
            if not prefix.blocks:
                del self._unused[prefix]
                self._unname(prefix)

    def _unname(self, prefix: KvPrefix) -> None:
        """Its names lead to the part before it, unless that has a name that all who share it know."""
        parent = prefix.parent
        for name in (prefix.name, *prefix.aliases):
            if self._named.get(name) is not prefix:
                continue
            if parent is None or parent.shared:
                del self._named[name]
            else:
                self._named[name] = parent
                if name != parent.name:
                    parent.aliases.append(name)


def _chain(prefix: KvPrefix | None) -> list[KvPrefix]:
    """A part and all before it."""
    parts = list[KvPrefix]()
    while prefix is not None:
        parts.append(prefix)
        prefix = prefix.parent
    return parts
