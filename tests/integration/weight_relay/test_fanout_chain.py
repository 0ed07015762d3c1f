"""A relay of another site brings each byte over the slow link once, and hands it on while the rest still comes."""

import asyncio
import time
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest

from ebbtide.errors import VersionUnavailable
from ebbtide.rpc.status_table import translated
from ebbtide.v1 import weights_pb2 as pb
from tests.integration.weight_relay.fanout import KIB, STREAM, TILE, RunningRelay, Version, readers, running
from tests.shaped_link import ShapedLink
from tests.support.waiting import wait_until

RATE = 2000 * KIB


def lacks_at_most(relay: RunningRelay, blobs: int) -> bool:
    """Whether version 1 is on its way and lacks no more."""
    return relay.arriving().get(1, 99) <= blobs


@pytest.fixture
async def home(tmp_path: Path) -> AsyncIterator[RunningRelay]:
    async with running(tmp_path / "home", site="home") as relay:
        yield relay


@pytest.fixture
async def link(home: RunningRelay) -> AsyncIterator[ShapedLink]:
    async with ShapedLink(home.address, RATE, 0.005) as link:
        yield link


@pytest.fixture
async def away(tmp_path: Path, link: ShapedLink) -> AsyncIterator[RunningRelay]:
    async with running(tmp_path / "away", site="away", name="away", upstream=link.address) as relay:
        yield relay


async def test_four_readers_behind_a_slow_link_cost_one_copy_and_end_soon_after_it(
    home: RunningRelay, link: ShapedLink, away: RunningRelay
) -> None:
    version = Version(1, tiles=48)
    await version.publish(home.relay)
    start = time.monotonic()
    async with readers(4, away.address, "away") as four:
        pulls = [asyncio.create_task(reader.pull(1)) for reader in four]
        await wait_until(lambda: away.versions() == [1], timeout=30, interval=0.001)
        brought, handed_on = time.monotonic() - start, sum(state.bytes for state in away.fanout.links.states())
        await asyncio.gather(*pulls)
        last = time.monotonic() - start
        assert all(reader.holds(version) for reader in four)
    assert link.received <= 1.02 * version.size
    assert handed_on >= 2 * version.size, "half of all was to be handed on before the last of it came"
    assert last <= 1.3 * brought
    assert sum(state.bytes for state in home.fanout.links.states()) == version.size


async def test_a_relay_that_has_the_version_before_is_sent_its_patch_alone_and_hands_that_on(
    home: RunningRelay, link: ShapedLink, away: RunningRelay
) -> None:
    first = Version(1)
    await first.publish(home.relay)
    async with readers(2, away.address, "away") as both:
        await asyncio.gather(*(reader.pull(1) for reader in both))
        await wait_until(lambda: away.versions() == [1])
        before = link.received
        second = Version(2, base=first)
        await second.publish(home.relay)
        await wait_until(lambda: away.versions() == [1, 2])
        assert link.received - before < first.size / 8
        taken = [await reader.pull(2) for reader in both]
        assert all(reader.holds(second) for reader in both)
        assert all(sum(sizes.values()) < first.size / 8 for sizes in taken)


async def test_a_newer_version_ends_the_arrival_of_one_that_nobody_reads(
    home: RunningRelay, link: ShapedLink, away: RunningRelay
) -> None:
    link.bytes_per_s = 400 * KIB
    await Version(1).publish(home.relay)
    await wait_until(lambda: 0 < away.arriving().get(1, 0) < 20, timeout=20, what="some of version 1")
    await Version(2).publish(home.relay)
    await wait_until(lambda: 2 in away.arriving(), what="the start of version 2")
    await wait_until(lambda: 1 not in away.arriving(), what="the end of version 1")
    link.bytes_per_s = 0
    await wait_until(lambda: away.versions() == [2])


async def test_an_older_arrival_that_is_being_read_is_finished_first(
    home: RunningRelay, link: ShapedLink, away: RunningRelay
) -> None:
    first, second = Version(1), Version(2)
    async with readers(1, away.address, "away") as [reader]:
        link.bytes_per_s = 1000 * KIB
        await first.publish(home.relay)
        pull = asyncio.create_task(reader.pull(1))
        await wait_until(lambda: away.fanout.holders.fetching(STREAM, 1), what="the reader")
        await second.publish(home.relay)
        await pull
        assert reader.holds(first)
    await wait_until(lambda: away.versions() == [1, 2])


async def test_of_all_that_the_upstream_lists_the_newest_is_brought_and_others_on_demand(
    home: RunningRelay, link: ShapedLink, tmp_path: Path
) -> None:
    versions = [Version(number) for number in (1, 2, 3)]
    for version in versions:
        await version.publish(home.relay)
    async with running(tmp_path / "late", upstream=link.address) as late:
        await wait_until(lambda: late.versions() == [3], timeout=20)
        assert link.received <= 1.1 * versions[-1].size
        async with readers(1, late.address) as [reader]:
            await reader.pull(1)
            assert reader.holds(versions[0])


async def test_a_version_that_a_holder_has_in_its_engine_alone_is_not_brought_for_it(
    home: RunningRelay, away: RunningRelay
) -> None:
    for number in (1, 2):
        await Version(number, tiles=4).publish(home.relay)
    await wait_until(lambda: 2 in away.versions())
    before = away.versions()
    assert await away.find("w", 7, site="away", done=True) == []
    assert (away.versions(), away.arriving()) == (before, {})
    assert away.fanout.holders.needed() == {(STREAM, 7)}


async def test_what_the_upstream_has_not_got_is_refused_at_once(home: RunningRelay, away: RunningRelay) -> None:
    start = time.monotonic()
    with pytest.raises(VersionUnavailable), translated("relay"):
        await away.find("w", 7)
    with pytest.raises(VersionUnavailable), translated("relay"):
        async for _ in away.stub.GetManifest(pb.VersionRef(run_id="nobody", policy="policy", version=1)):
            pass
    assert time.monotonic() - start < 5


async def test_a_cut_link_costs_what_was_under_way_and_no_more(
    home: RunningRelay, link: ShapedLink, away: RunningRelay
) -> None:
    version = Version(1, tiles=32)
    await version.publish(home.relay)
    for left in (24, 12, 4):
        await wait_until(partial(lacks_at_most, away, left), timeout=20, interval=0.001)
        link.cut()
        link.mend()
    await wait_until(lambda: away.versions() == [1], timeout=30)
    # Four calls of at most four tiles each may have lost what they had of it.
    assert link.received <= version.size + 3 * 8 * TILE


async def test_a_restarted_relay_goes_on_with_what_lies_on_its_disk(
    home: RunningRelay, link: ShapedLink, tmp_path: Path
) -> None:
    version = Version(1)
    await version.publish(home.relay)
    async with running(tmp_path / "away", upstream=link.address) as away:
        await wait_until(partial(lacks_at_most, away, 12), timeout=20, interval=0.001)
    link.cut()  # as a process that ends does, whose connections this one would use on
    link.mend()
    before = link.received
    async with running(tmp_path / "away", upstream=link.address) as away:
        assert away.arriving()[1] <= 12
        await wait_until(lambda: away.versions() == [1], timeout=20)
    assert link.received - before <= (12 + 4) * TILE


async def test_versions_of_other_runs_stay_away_if_one_run_is_followed(home: RunningRelay, tmp_path: Path) -> None:
    version = Version(1)
    await version.publish(home.relay)
    async with running(tmp_path / "away", upstream=home.address, upstream_runs=("another",)) as away:
        with pytest.raises(VersionUnavailable), translated("relay"):
            await away.find("w", 1)
        assert away.versions() == []
