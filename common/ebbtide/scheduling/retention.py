"""Which policy versions a relay lets go: the newest few of each stream stay, within a budget of bytes.

A stream is one policy of one run. Tiles that several versions share count once.
"""

from collections import Counter
from collections.abc import Iterable, Mapping

from msgspec import Struct


class HeldVersion(Struct, frozen=True, kw_only=True):
    """A committed version: `tiles` maps its digests to bytes, `idle_s` counts since it was published or read."""

    stream: tuple[str, str]
    version: int
    tiles: Mapping[bytes, int]
    idle_s: float = 0.0


class RetentionPlan(Struct, frozen=True, kw_only=True):
    """What to let go, first to last, and the bytes by which the rest still exceeds the budget (0: it fits)."""

    evict: tuple[HeldVersion, ...]
    excess_bytes: int


def plan_retention(
    held: Iterable[HeldVersion],
    *,
    keep_versions: int,
    budget_bytes: int,
    abandoned_s: float,
    incoming: Mapping[bytes, int],
) -> RetentionPlan:
    """Plan evictions so that what stays, together with the tiles `incoming`, fits into `budget_bytes`.

    Versions beyond the newest `keep_versions` of their stream always go. For the budget go, longest idle first, those
    that are not the newest of their stream, and after them the newest of streams that were idle for `abandoned_s`.
    The newest version of a live stream never goes: late joiners need it.
    """
    newest_first = sorted(held, key=lambda item: -item.version)
    rank: Counter[tuple[str, str]] = Counter()
    surplus: list[HeldVersion] = []
    older: list[HeldVersion] = []
    abandoned: list[HeldVersion] = []
    for item in newest_first:
        place = rank[item.stream]
        rank[item.stream] += 1
        if place >= keep_versions:
            surplus.append(item)
        elif place:
            older.append(item)
        elif item.idle_s >= abandoned_s:
            abandoned.append(item)
    stock = _Stock(newest_first, incoming)
    evict = sorted(surplus, key=lambda item: (item.stream, item.version))
    for item in evict:
        stock.remove(item)
    for group in (older, abandoned):
        for item in sorted(group, key=lambda item: (-item.idle_s, item.version)):
            if stock.bytes <= budget_bytes:
                break
            stock.remove(item)
            evict.append(item)
    return RetentionPlan(evict=tuple(evict), excess_bytes=max(0, stock.bytes - budget_bytes))


class _Stock:
    """Bytes of the distinct tiles in use."""

    def __init__(self, held: Iterable[HeldVersion], incoming: Mapping[bytes, int]) -> None:
        self._users: Counter[bytes] = Counter()
        self.bytes = 0
        for tiles in (incoming, *(item.tiles for item in held)):
            for digest, size in tiles.items():
                self.bytes += 0 if self._users[digest] else size
                self._users[digest] += 1

    def remove(self, item: HeldVersion) -> None:
        for digest, size in item.tiles.items():
            self._users[digest] -= 1
            self.bytes -= 0 if self._users[digest] else size
