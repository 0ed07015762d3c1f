"""Rates hold, and turns are fair among links and among a link's readers, however many streams one opens."""

import random
from collections import Counter

import pytest

from ebbtide.weight_relay.upload_scheduler import (
    BURST_S,
    LinkAsk,
    LinkRate,
    TokenBucket,
    UploadScheduler,
    parse_limits,
)

MIB = 1 << 20


class Load:
    """Streams that each ask again as soon as they were served, on a clock of its own."""

    def __init__(self, *, total: float = 0.0, limits: dict[str, float] | None = None) -> None:
        limits = limits or {}
        self.now = 0.0
        self.turns = UploadScheduler(total=total, rate_of=lambda link: limits.get(link, 0.0), now=0.0)
        self.sent: Counter[str] = Counter()

    def open(self, link: str, reader: str, *, streams: int = 1, size: int = MIB) -> None:
        for _ in range(streams):
            self.turns.add(LinkAsk(link, reader, size), self.now)

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while True:
            while ask := self.turns.next(self.now):
                self.sent[ask.reader] += ask.size
                self.turns.add(ask, self.now)
            self.now += max(self.turns.wait(self.now), 1e-6)
            if self.now > end:
                return


def test_a_link_sends_at_its_rate_even_items_larger_than_its_burst() -> None:
    load = Load(limits={"a": 10 * MIB})
    load.open("a", "one")
    load.run(20.0)
    assert load.sent["one"] == pytest.approx(200 * MIB, rel=0.02)


def test_one_reader_with_a_hundred_streams_gets_no_more_than_one_with_one() -> None:
    load = Load(limits={"a": 10 * MIB})
    load.open("a", "greedy", streams=100)
    load.open("a", "modest")
    load.run(20.0)
    assert load.sent["modest"] == pytest.approx(load.sent["greedy"], rel=0.03)


def test_small_blobs_get_as_many_bytes_as_large_ones() -> None:
    load = Load(limits={"a": 10 * MIB})
    load.open("a", "dense")
    load.open("a", "patches", size=MIB // 50)
    load.run(20.0)
    assert load.sent["patches"] == pytest.approx(load.sent["dense"], rel=0.03)


def test_links_share_the_total_however_many_readers_each_has() -> None:
    load = Load(total=12 * MIB, limits={"slow": 2 * MIB})
    for reader in ("b1", "b2", "b3", "b4"):
        load.open("b", reader, streams=3)
    load.open("c", "c1")
    load.open("slow", "s1")
    load.run(20.0)
    links = {"b": sum(load.sent[f"b{i}"] for i in range(1, 5)), "c": load.sent["c1"], "slow": load.sent["s1"]}
    assert links["slow"] == pytest.approx(40 * MIB, rel=0.05)
    assert links["b"] == pytest.approx(links["c"], rel=0.03)
    assert sum(links.values()) == pytest.approx(240 * MIB, rel=0.02)


def test_who_was_idle_has_saved_nothing_up() -> None:
    load = Load(limits={"a": 10 * MIB})
    load.open("a", "steady")
    load.run(20.0)
    before = load.sent["steady"]
    load.open("a", "late")
    load.run(10.0)
    assert load.sent["late"] == pytest.approx(load.sent["steady"] - before, rel=0.05)


def test_an_ask_that_was_dropped_gets_no_turn_and_holds_up_nobody() -> None:
    turns = UploadScheduler(total=0.0, rate_of=lambda _: 0.0, now=0.0)
    gone, stays = LinkAsk("a", "gone", MIB), LinkAsk("a", "stays", MIB)
    turns.add(gone, 0.0)
    turns.add(stays, 0.0)
    turns.drop(gone)
    assert (turns.next(0.0), turns.next(0.0)) == (stays, None)
    assert turns.wait(0.0) == float("inf")


def test_idle_links_are_forgotten_once_they_owe_nothing() -> None:
    made: list[str] = []

    def rate_of(link: str) -> float:
        made.append(link)
        return float(MIB) if link == "slow" else 0.0

    turns = UploadScheduler(total=0.0, rate_of=rate_of, now=0.0)

    def send(link: str, now: float) -> bool:
        turns.add(LinkAsk(link, "r", MIB), now)
        sent = turns.next(now) is not None
        assert turns.next(now) is None
        return sent

    assert send("slow", 0.0)
    assert all(send(f"host{number}", 0.0) for number in range(100))
    assert not send("slow", 0.5), "what it owes is not forgotten"
    assert send("host7", 0.5)
    assert (made.count("host7"), made.count("host8"), made.count("slow")) == (2, 1, 1)
    assert turns.next(2.0) is not None
    assert send("slow", 9.0)
    assert made.count("slow") == 1
    assert turns.next(99.0) is None
    assert send("slow", 99.0)
    assert made.count("slow") == 2


def test_without_limits_nobody_waits() -> None:
    turns = UploadScheduler(total=0.0, rate_of=lambda _: 0.0, now=0.0)
    for _ in range(1000):
        turns.add(LinkAsk("a", "r", MIB), 0.0)
    assert sum(turns.next(0.0) is not None for _ in range(1001)) == 1000


@pytest.mark.parametrize("seed", range(10))
def test_readers_of_a_link_are_never_further_apart_than_their_largest_blobs(seed: int) -> None:
    rng = random.Random(seed)
    load = Load(limits={"a": 10 * MIB})
    sizes = {f"r{i}": rng.randrange(1, MIB) for i in range(5)}
    for reader, size in sizes.items():
        load.open("a", reader, streams=rng.randrange(1, 20), size=size)
    for _ in range(50):
        load.run(0.2)
        assert max(load.sent.values()) - min(load.sent[reader] for reader in sizes) <= 2 * max(sizes.values())


def test_a_bucket_saves_up_no_more_than_its_burst() -> None:
    bucket = TokenBucket(100.0, 0.0)
    assert bucket.wait(1000.0) == 0.0
    bucket.take(110)
    assert bucket.wait(1000.0) == pytest.approx(1.1 - BURST_S)


def test_a_rate_forgets() -> None:
    rate = LinkRate(0.0)
    for second in range(60):
        rate.add(100, float(second))
    assert rate.lately(59.0) == pytest.approx(100, rel=0.1)
    assert rate.lately(200.0) < 1
    assert rate.total == 6000


def test_limits_are_read_and_nonsense_is_refused() -> None:
    assert parse_limits(["eu=1e6", "*=0"]) == {"eu": 1e6, "*": 0.0}
    for bad in (["eu"], ["eu=fast"], ["eu=-1"], ["eu=inf"], ["eu=nan"], ["=5"]):
        with pytest.raises(ValueError, match=r"must be NAME=BYTES_PER_S"):
            parse_limits(bad)
    with pytest.raises(ValueError, match="once more"):
        parse_limits(["eu=1", "eu=2"])
