"""Ranks the sources of a version for a requester: the nearest holders that have or fetch it first, the relay last.

Readers form a tree per site. Its root, the site's *seed*, alone reads from the origin, the relay that answers. Only
requesters registered after an arriving copy read from it, and a finished copy reads from no other. So however holders
come, go and fail, they never wait in a circle, and a slow link from the origin to a site is crossed once while the
site's seed lives. The index over replicas, one seed per site, and reading from an arriving copy follow TensorHub (arXiv
2604.09107). That paper does not give its rule for scoring sources; this one is ours.
"""

from collections import Counter
from collections.abc import Collection, Iterable
from typing import Any, Final

from msgspec import Struct

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
