"""Ranks the sources of a version for a requester: the nearest holders that have or fetch it first, the relay last.

Readers form a tree per site. Its root, the site's *seed*, alone reads from the origin, the relay that answers. Only
requesters registered after an arriving copy read from it, and a finished copy reads from no other. So however holders
come, go and fail, they never wait in a circle, and a slow link from the origin to a site is crossed once while the
site's seed lives. The index over replicas, one seed per site, and reading from an arriving copy follow TensorHub (arXiv
2604.09107). That paper does not give its rule for scoring sources; this one is ours.

`VersionCopies` keeps the live copies of one version by place, so that a choice looks at few of many copies. A place
offers the copies that are next in turn; those that turn out to have enough readers go to the end. Of arriving copies it
also offers the oldest: a requester reads only from older ones, and without any it would cross a slow link.
"""

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Iterator
from itertools import chain, islice
from typing import Any, Final

from msgspec import Struct, field

from ebbtide.types.weights import FAR, SAME_HOST, Holder, distance

#: Stands for the origin among sources.
ORIGIN: Final = ""
#: Readers of one peer before others are preferred: two double each row of the tree, a third makes up for a slow one.
FEW: Final = 3

#: Sources named to a requester besides the origin: one to read from, and two in reserve.
MOST: Final = 3
#: How long an address is quarantined for a requester that complained, and the complaints that quarantine it for all.
QUARANTINE_S: Final = 30.0
SEVERAL: Final = 3
#: Addresses with complaints that are known at once, and complaints of each: every request reads all of them.
MOST_FAILED: Final = 1024
MOST_COMPLAINTS: Final = 64


class VersionCopy(Struct, kw_only=True):
    """A holder's copy of one version."""

    holder: Holder
    order: int  # in which the version's holders came
    seen: float
    done: bool = False  # whole; else arriving
    source: str | None = None  # named first to the holder lately; None: none yet
    depth: int = 0  # copies between it and the origin, itself included
    install_s: float = 0.0
    have: tuple[int, ...] = ()  # versions that the holder has


class BlobOrigin(Struct, frozen=True, kw_only=True):
    """The relay that answers."""

    site: str
    trainers: bool  # it has no upstream, so that its sends burden the trainer's link


def choose_sources(
    requester: VersionCopy,
    copies: Collection[VersionCopy],
    readers: Counter[str | None],
    origin: BlobOrigin,
    quarantined: Collection[str],
) -> list[str]:
    """Name the holders to read from, best first, with `ORIGIN` among them. Sets the requester's `source` and `depth`.

    `copies`: live ones of the wanted version. `readers`: the arriving copies of each source, without the requester.
    Addresses in `quarantined` are passed over.
    """
    usable = [copy for copy in copies if _may_serve(copy, requester) and copy.holder.address not in quarantined]
    near = [copy for copy in usable if distance(copy.holder, requester.holder) != FAR]
    if near:
        names = _ranked(requester, near, readers)
        names.insert(_place_of_origin(requester, near, names, readers, origin), ORIGIN)
        names = [name for number, name in enumerate(names) if number < MOST or name == ORIGIN]
    else:
        far = _ranked(requester, usable, readers)[:MOST]
        names = [*far, ORIGIN] if origin.trainers else [ORIGIN, *far]
    requester.source = names[0]
    depths = {copy.holder.name: 0 if copy.done else copy.depth for copy in near or usable}
    requester.depth = 1 + depths.get(names[0], 0)
    return names


class SourceComplaints:
    """Addresses that failed requesters lately. Beyond a bound the oldest are forgotten; requesters complain again."""

    def __init__(self) -> None:
        self._until: dict[str, dict[str, float]] = {}  # address -> requester -> when its complaint expires

    def add(self, requester: str, addresses: Iterable[str], now: float) -> None:
        for address in addresses:
            until = self._until[address] = self._until.pop(address, {})  # the last of all now
            until.pop(requester, None)
            until[requester] = now + QUARANTINE_S
            _forget_oldest(until, MOST_COMPLAINTS)
        _forget_oldest(self._until, MOST_FAILED)

    def quarantined(self, requester: str, now: float) -> set[str]:
        """The addresses that `requester` is not sent to."""
        for address, until in list(self._until.items()):
            self._until[address] = live = {name: end for name, end in until.items() if end > now}
            if not live:
                del self._until[address]
        return {address for address, until in self._until.items() if requester in until or len(until) >= SEVERAL}


def _forget_oldest(items: dict[str, Any], most: int) -> None:
    for key in list(items)[: max(0, len(items) - most)]:
        del items[key]


def lasts(copy: VersionCopy) -> bool:
    """Whether it is whole and safe.

    Spot machines may go at any moment, and copies without an address lie in engines.
    """
    return copy.done and copy.holder.lasting and bool(copy.holder.address)


def _may_serve(copy: VersionCopy, requester: VersionCopy) -> bool:
    holder = copy.holder
    if not holder.address or requester.holder.name == holder.name or requester.holder.address == holder.address:
        return False
    if copy.done:
        return True
    return copy.order < requester.order and distance(holder, requester.holder) != FAR


def _ranked(requester: VersionCopy, copies: Iterable[VersionCopy], readers: Counter[str | None]) -> list[str]:
    def cost(copy: VersionCopy) -> tuple[float, ...]:
        load = readers[copy.holder.name]
        # The source stays, unless a nearer one came: blobs on their way would be asked for again.
        stays = 0 if copy.holder.name == requester.source else 1
        depth = 0 if copy.done else copy.depth
        far = distance(copy.holder, requester.holder)
        return far, stays, load >= FEW, load + depth, copy.holder.readers, copy.order

    return [copy.holder.name for copy in sorted(copies, key=cost)]


def _place_of_origin(
    requester: VersionCopy, near: list[VersionCopy], names: list[str], readers: Counter[str | None], origin: BlobOrigin
) -> int:
    """After all peers, unless the relay is of the site itself and may serve a few of them."""
    if origin.trainers or origin.site != requester.holder.site:
        return len(names)
    on_host = sum(1 for copy in near if distance(copy.holder, requester.holder) == SAME_HOST)
    if on_host:
        return on_host
    if requester.source == ORIGIN:
        return 0
    best = next(copy for copy in near if copy.holder.name == names[0])
    load = readers[best.holder.name] + (0 if best.done else best.depth)
    stays = best.holder.name == requester.source
    return 1 if stays or readers[ORIGIN] >= FEW or readers[ORIGIN] > load else 0


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
