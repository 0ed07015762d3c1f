"""Keeps the live copies of one version by place, so that a choice of sources looks at few of many copies.

A place offers the copies that are next in turn; those that turn out to have enough readers go to the end. Of arriving
copies it also offers the oldest: a requester reads only from older ones, and without any it would cross a slow link.
"""

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Iterator
from itertools import chain, islice
from typing import Final

from msgspec import Struct, field

from ebbtide.scheduling.distribution.source_ranking import FEW, BlobOrigin, VersionCopy, choose_sources, lasts
from ebbtide.types.weights import Holder

#: Copies that a place offers of each kind: among them are some that may be read from, and have few readers.
OFFERED: Final = 16
_Copies = OrderedDict[str, VersionCopy]  # by name of the holder
_ANYWHERE: Final = ("anywhere", "")


class _Place(Struct):
    """The copies of one host or site, or all that are whole."""

    whole: _Copies = field(default_factory=OrderedDict)
    arriving: _Copies = field(default_factory=OrderedDict)
    oldest: _Copies = field(default_factory=OrderedDict)  # of the arriving ones, by age

    def offers(self) -> Iterator[VersionCopy]:
        kinds = self.whole, self.arriving, self.oldest
        return chain.from_iterable(islice(kind.values(), OFFERED) for kind in kinds)


class VersionCopies:
    def __init__(self) -> None:
        self.by_name: dict[str, VersionCopy] = {}
        self.arriving = self.lasting = 0  # copies; see `lasts`
        self._readers: Counter[str | None] = Counter()  # arriving copies by source
        self._places: dict[tuple[str, str], _Place] = {}

    def add(self, copy: VersionCopy) -> None:
        """Add a copy, the newest one, in place of any of the same holder."""
        self.remove(copy.holder.name)
        self.by_name[copy.holder.name] = copy
        self._count(copy, 1)
        self._offer(copy)

    def remove(self, name: str) -> None:
        """Forget a holder's copy, if there is one."""
        if (copy := self.by_name.pop(name, None)) is not None:
            self._count(copy, -1)
            self._withdraw(copy)

    def update(self, copy: VersionCopy, holder: Holder, *, done: bool) -> None:
        """Take in what the holder of a copy reports of itself, and whether the copy is whole."""
        offered_anew = done != copy.done or _offered_at(holder) != _offered_at(copy.holder)
        if offered_anew:
            self._withdraw(copy)
        self._count(copy, -1)
        copy.holder, copy.done = holder, done
        self._count(copy, 1)
        if offered_anew:
            self._offer(copy)

    def choose(self, copy: VersionCopy, origin: BlobOrigin, quarantined: Collection[str]) -> list[str]:
        """Name sources for the holder of `copy`; see `choose_sources`."""
        self._count(copy, -1)
        names = choose_sources(copy, self.offers(copy), self._readers, origin, quarantined)
        self._count(copy, 1)
        for place in self._at(_places(copy.holder)):
            for kind in (place.whole, place.arriving):
                for name in list(islice(kind, OFFERED)):
                    if self._readers[name] >= FEW:
                        kind.move_to_end(name)
        return names

    def offers(self, copy: VersionCopy) -> list[VersionCopy]:
        """The copies that its holder may choose from: its source, and some of its host, of its site and of any."""
        found = {copy.source: self.by_name[copy.source]} if copy.source in self.by_name else {}
        for place in self._at(_places(copy.holder)):
            found.update((offered.holder.name, offered) for offered in place.offers())
        return list(found.values())

    def _at(self, keys: Iterable[tuple[str, str]]) -> list[_Place]:
        return [self._places[key] for key in keys if key in self._places]

    def _count(self, copy: VersionCopy, by: int) -> None:
        self.lasting += by * lasts(copy)
        if not copy.done:
            self.arriving += by
            self._readers[copy.source] += by
            if not self._readers[copy.source]:
                del self._readers[copy.source]

    def _offer(self, copy: VersionCopy) -> None:
        name = copy.holder.name
        for key in _offered_at(copy.holder):
            if copy.done:
                self._places.setdefault(key, _Place()).whole[name] = copy
            elif key != _ANYWHERE:  # a distant copy is read from once it is whole
                place = self._places.setdefault(key, _Place())
                place.arriving[name] = place.oldest[name] = copy

    def _withdraw(self, copy: VersionCopy) -> None:
        for key in _offered_at(copy.holder):
            for place in self._at([key]):
                for kind in (place.whole, place.arriving, place.oldest):
                    kind.pop(copy.holder.name, None)
                if not place.whole and not place.arriving:
                    del self._places[key]


def _places(holder: Holder) -> list[tuple[str, str]]:
    """The places of a process, nearest first."""
    host = [("host", holder.host)] if holder.host else []
    return [*host, ("site", holder.site), _ANYWHERE]


def _offered_at(holder: Holder) -> list[tuple[str, str]]:
    """The places that offer the holder's copy; none if it serves nothing."""
    return _places(holder) if holder.address else []
