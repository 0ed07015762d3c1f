"""Places chunks on engines as Seer does (arXiv 2511.14617).

A chunk goes where memory for all of it is free. While no engine runs many more requests than another, it goes on where
it ran last, which has the longest prefix of it; otherwise to the engine with the fewest requests.
"""

from collections.abc import Sequence
from typing import Final

from msgspec import Struct

#: The difference of running requests from which on the fewest decide.
_UNEVEN: Final = 32


class ChunkPlace(Struct, eq=False, kw_only=True):
    """One engine. `free`: tokens of memory that no chunk has."""

    session_id: str
    running: int
    slots: int
    free: int

    def take(self, tokens: int) -> None:
        self.running += 1
        self.free -= tokens


def chunk_place(places: Sequence[ChunkPlace], tokens: int, home: str) -> ChunkPlace | None:
    """Where a chunk goes that needs so much memory, its context included; None: nowhere now. `home`: the session that
    ran its request last.
    """
    fit = [one for one in places if one.free >= tokens and one.running < one.slots]
    if not fit:
        return None
    counts = [one.running for one in places]
    if max(counts) - min(counts) <= _UNEVEN:
        for one in fit:
            if one.session_id == home:
                return one
    return min(fit, key=lambda one: one.running)
