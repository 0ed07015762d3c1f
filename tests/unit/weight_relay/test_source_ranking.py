"""Who reads from whom: near before far, once over each slow link, never in a circle."""

import random
from collections import Counter
from collections.abc import Collection, Iterable

import pytest

from ebbtide.types.weights import Holder
from ebbtide.weight_relay import source_ranking
from ebbtide.weight_relay.source_ranking import (
    FEW,
    MOST_FAILED,
    ORIGIN,
    QUARANTINE_S,
    SEVERAL,
    BlobOrigin,
    SourceComplaints,
    VersionCopies,
    VersionCopy,
    lasts,
)

TRAINERS = BlobOrigin(site="home", trainers=True)
SITES_OWN = BlobOrigin(site="a", trainers=False)


def copy(
    name: str, order: int, site: str = "a", *, host: str = "", done: bool = False, lasting: bool = True
) -> VersionCopy:
    holder = Holder(name=name, site=site, host=host, address=f"{name}:1", lasting=lasting)
    return VersionCopy(holder=holder, order=order, seen=0.0, done=done)


def choose(
    asked: VersionCopy, copies: Iterable[VersionCopy], origin: BlobOrigin, quarantined: Collection[str]
) -> list[str]:
    """What `asked` is told among `copies`."""
    table = VersionCopies()
    for one in sorted({one.holder.name: one for one in [*copies, asked]}.values(), key=lambda one: one.order):
        table.add(one)
    return table.choose(asked, origin, quarantined)


def joined(copies: Iterable[VersionCopy], origin: BlobOrigin = TRAINERS) -> list[VersionCopy]:
    """Each asks once, in order."""
    copies = list(copies)
    for number, one in enumerate(copies):
        choose(one, copies[: number + 1], origin, ())
    return copies


def test_same_host_comes_before_same_site_before_the_origin() -> None:
    asked = copy("asked", 9, host="h")
    others = [copy("site", 0), copy("host", 1, host="h"), copy("far", 2, "b", done=True)]
    assert choose(asked, [*others, asked], TRAINERS, ()) == ["host", "site", ORIGIN]


def test_a_sites_first_goes_to_whole_copies_of_other_sites_and_to_the_trainers_relay_last() -> None:
    others = [copy("whole", 0, "b", done=True), copy("arriving", 1, "b")]
    assert choose(copy("asked", 2), others, TRAINERS, ()) == ["whole", ORIGIN]
    assert choose(copy("asked", 2), others, BlobOrigin(site="b", trainers=False), ()) == [ORIGIN, "whole"]


def test_only_those_who_came_before_or_are_whole_may_be_read_from() -> None:
    others = [copy("before", 0), copy("behind", 2), copy("behind-but-whole", 3, done=True)]
    assert set(choose(copy("asked", 1), others, TRAINERS, ())) == {"before", "behind-but-whole", ORIGIN}


def test_who_serves_nothing_or_is_avoided_is_not_named() -> None:
    mute = VersionCopy(holder=Holder(name="mute", site="a"), order=0, seen=0.0, done=True)
    others = [mute, copy("broken", 1), copy("good", 2)]
    assert choose(copy("asked", 3), others, TRAINERS, {"broken:1"}) == ["good", ORIGIN]


def test_readers_of_one_site_form_a_tree_with_few_readers_each_and_one_at_the_origin() -> None:
    copies = joined(copy(f"w{i}", i) for i in range(16))
    sources = [one.source for one in copies]
    assert sources.count(ORIGIN) == 1
    assert max(sources.count(one.holder.name) for one in copies) <= FEW
    assert max(one.depth for one in copies) <= 5


def test_a_thousand_readers_form_as_even_a_tree_as_a_few() -> None:
    table = VersionCopies()
    for number in range(1000):
        table.add(newest := copy(f"w{number}", number))
        table.choose(newest, TRAINERS, ())
    readers = Counter(one.source for one in table.by_name.values())
    assert readers[ORIGIN] == 1
    assert max(readers.values()) <= FEW
    assert max(one.depth for one in table.by_name.values()) <= 9


def test_whole_copies_share_their_readers_evenly() -> None:
    copies = joined([*(copy(f"d{i}", i, done=True) for i in range(3)), *(copy(f"w{i}", 9 + i) for i in range(6))])
    sources = [one.source for one in copies[3:]]
    assert max(sources.count(f"d{i}") for i in range(3)) <= 2


def test_a_relay_of_the_site_serves_a_few_itself() -> None:
    copies = joined((copy(f"w{i}", i) for i in range(8)), SITES_OWN)
    assert 2 <= sum(one.source == ORIGIN for one in copies) <= FEW


def test_a_reader_stays_with_its_source_until_it_is_avoided() -> None:
    copies = joined(copy(f"w{i}", i) for i in range(8))
    last = copies[-1]
    first = last.source
    copies[-2].source = first  # one more reader there
    assert choose(last, copies, TRAINERS, ())[0] == first
    assert choose(last, copies, TRAINERS, {f"{first}:1"})[0] != first


def test_copies_on_spot_machines_are_not_counted_as_safe() -> None:
    copies = [copy("spot", 0, done=True, lasting=False), copy("kept", 1, done=True), copy("arriving", 2)]
    assert [one.holder.name for one in copies if lasts(one)] == ["kept"]


def test_a_source_that_failed_one_is_quarantined_for_it_alone_and_after_several_for_all() -> None:
    complaints = SourceComplaints()
    complaints.add("w0", ["bad:1"], 0.0)
    assert complaints.quarantined("w0", 1.0) == {"bad:1"}
    assert complaints.quarantined("other", 1.0) == set()
    for number in range(1, SEVERAL):
        complaints.add(f"w{number}", ["bad:1"], 2.0)
    assert complaints.quarantined("other", 3.0) == {"bad:1"}
    assert complaints.quarantined("other", 1.0 + QUARANTINE_S) == set()  # the first one's counts no longer
    assert complaints.quarantined("w1", 1.0 + QUARANTINE_S) == {"bad:1"}
    assert complaints.quarantined("w1", 2.0 + QUARANTINE_S) == set()


def test_of_very_many_complaints_the_oldest_are_forgotten() -> None:
    complaints = SourceComplaints()
    complaints.add("w0", ["old:1", "again:1"], 0.0)
    complaints.add("w0", ["again:1"], 1.0)
    complaints.add("w0", [f"made-up-{number}:1" for number in range(MOST_FAILED - 1)], 2.0)
    quarantined = complaints.quarantined("w0", 3.0)
    assert len(quarantined) == MOST_FAILED
    assert "again:1" in quarantined
    assert "old:1" not in quarantined


class World:
    """Holders that come, ask, die and finish in any order. A reader is told at once when its source dies."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.origin = self.rng.choice([TRAINERS, SITES_OWN])
        self.table = VersionCopies()
        self.copies = self.table.by_name
        self.reads: dict[str, list[str]] = {}
        self.order = 0

    def step(self) -> None:
        move = self.rng.choice(["join", "join", "ask", "ask", "die", "finish"])
        if move == "join":
            name = f"w{self.rng.randrange(12)}"  # one that died may come back under its old name
            if name not in self.copies:
                site, host = self.rng.choice(["a", "a", "b", "home"]), self.rng.choice(["", "h1", "h2"])
                self.table.add(copy(name, self.order, site, host=host and f"{site}-{host}"))
                self.order += 1
                self.ask(name)
        elif self.copies:
            name = self.rng.choice(list(self.copies))
            {"ask": self.ask, "die": self.die, "finish": self.finish}[move](name)

    def ask(self, name: str) -> None:
        if not self.copies[name].done:
            self.reads[name] = self.table.choose(self.copies[name], self.origin, ())

    def die(self, name: str) -> None:
        self.table.remove(name)
        self.reads.pop(name, None)
        for reader in [reader for reader, sources in self.reads.items() if name in sources]:
            self.ask(reader)

    def finish(self, name: str) -> None:
        self.table.update(self.copies[name], self.copies[name].holder, done=True)
        self.reads.pop(name, None)

    def check(self) -> None:
        assert all(ORIGIN in sources for sources in self.reads.values())
        self.check_no_circle()
        for site in ("a", "b", "home"):
            arriving = [c for c in self.copies.values() if c.holder.site == site and not c.done]
            bringing = [c for c in arriving if self.crosses(c)]
            if self.origin.trainers or self.origin.site != site:
                assert len(bringing) <= 1, f"{len(bringing)} bring it to {site}"
            whole = any(c.done and c.holder.site == site for c in self.copies.values())
            assert whole or not arriving or bringing, f"nobody brings it to {site}"

    def crosses(self, reader: VersionCopy) -> bool:
        source = self.copies.get(reader.source or "")
        return source is None or source.holder.site != reader.holder.site

    def check_no_circle(self) -> None:
        left = {name: {s for s in sources if s in self.reads} for name, sources in self.reads.items()}
        while left:
            free = [name for name, sources in left.items() if not sources & left.keys()]
            assert free, f"in a circle: {left}"
            for name in free:
                del left[name]


@pytest.mark.parametrize("seed", range(60))
def test_however_holders_come_and_go_none_wait_in_a_circle_and_each_link_is_crossed_once(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_ranking, "OFFERED", 1 + seed % 4)  # few, as among very many copies
    world = World(seed)
    for _ in range(300):
        world.step()
        world.check()
