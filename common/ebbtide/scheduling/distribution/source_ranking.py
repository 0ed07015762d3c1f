"""From whom a requester fetches a version: the nearest that has it or is fetching it, the relay that is asked last.

Readers form a tree per site whose root, the site's *seed*, alone reads from the origin: the relay that answers. A copy
that is still arriving is read from only by requesters that were registered behind it, and one that is done reads from
nobody; so however holders come, go and fail, nobody waits in a circle, and a slow link between the origin and a site is
crossed once while the site's seed lives. The index over replicas, one seed per site and reading behind a copy that is
still arriving follow TensorHub (arXiv 2604.09107); there the rule that scores sources is not told, this one is ours.
"""

from collections import Counter
from collections.abc import Collection, Iterable
from typing import Any, Final

from msgspec import Struct

from ebbtide.types.weights import FAR, SAME_HOST, Holder, distance

#: Stands for the origin among sources.
ORIGIN: Final = ""
#: Readers of one peer before others are preferred: two double a tree's rows, a third covers for one that is slow.
FEW: Final = 3

#: Sources named to a requester besides the origin: one to read from, and two for when it breaks.
MOST: Final = 3
#: How long one that complained is not sent to an address again, and how many must complain for nobody to be.
SHUN_S: Final = 30.0
SEVERAL: Final = 3
#: Addresses of which complaints are known at once, and complaints of each: each requester looks at all of them.
MOST_FAILED: Final = 1024
MOST_COMPLAINTS: Final = 64


class VersionCopy(Struct, kw_only=True):
    """A holder's copy of one version, whole (`done`) or arriving.

    `order` counts the holders of the version as they came. `source` was named first to it lately (ORIGIN: the origin;
    None: nobody yet), and `depth` counts the copies between it and the origin, itself included.
    """

    holder: Holder
    order: int
    seen: float
    done: bool = False
    source: str | None = None
    depth: int = 0
    install_s: float = 0.0


class BlobOrigin(Struct, frozen=True, kw_only=True):
    """The relay that answers. `trainers`: it has no upstream, so that what it sends burdens the trainer's link."""

    site: str
    trainers: bool


def choose_sources(
    requester: VersionCopy, copies: Collection[VersionCopy], origin: BlobOrigin, shunned: Collection[str]
) -> list[str]:
    """The names of the holders to read from, best first, with `ORIGIN` among them; at least that.

    `copies` are those of the wanted version that were heard of lately; addresses in `shunned` are passed over. The
    requester's `source` and `depth` are set to what is chosen.
    """
    usable = [copy for copy in copies if _may_serve(copy, requester) and copy.holder.address not in shunned]
    near = [copy for copy in usable if distance(copy.holder, requester.holder) != FAR]
    readers = Counter(copy.source for copy in copies if not copy.done and copy.holder.name != requester.holder.name)
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
    """Addresses that failed somebody lately; beyond a bound the oldest are forgotten. Kept in memory alone: who is
    failed again complains again."""

    def __init__(self) -> None:
        self._until: dict[str, dict[str, float]] = {}  # address -> who complained -> until when that counts

    def add(self, requester: str, addresses: Iterable[str], now: float) -> None:
        for address in addresses:
            until = self._until[address] = self._until.pop(address, {})  # the last of all now
            until.pop(requester, None)
            until[requester] = now + SHUN_S
            _forget_oldest(until, MOST_COMPLAINTS)
        _forget_oldest(self._until, MOST_FAILED)

    def shunned(self, requester: str, now: float) -> set[str]:
        """The addresses that `requester` is not to be sent to."""
        for address, until in list(self._until.items()):
            self._until[address] = live = {name: end for name, end in until.items() if end > now}
            if not live:
                del self._until[address]
        return {address for address, until in self._until.items() if requester in until or len(until) >= SEVERAL}


def _forget_oldest(items: dict[str, Any], most: int) -> None:
    for key in list(items)[: max(0, len(items) - most)]:
        del items[key]


def lasting_copies(copies: Iterable[VersionCopy]) -> int:
    """Whole copies that may count as safe: those on spot machines are gone at any moment, and those without an address
    lie in engines, which nobody can fetch from."""
    return sum(1 for copy in copies if copy.done and copy.holder.lasting and copy.holder.address)


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
        # Who is read from stays, unless somebody nearer came: what is on its way would be asked for again.
        stays = 0 if copy.holder.name == requester.source else 1
        depth = 0 if copy.done else copy.depth
        far = distance(copy.holder, requester.holder)
        return far, stays, load >= FEW, load + depth, copy.holder.readers, copy.order

    return [copy.holder.name for copy in sorted(copies, key=cost)]


def _place_of_origin(
    requester: VersionCopy, near: list[VersionCopy], names: list[str], readers: Counter[str | None], origin: BlobOrigin
) -> int:
    """Behind all peers, unless it is a relay of the site itself, which may serve a few of them."""
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
