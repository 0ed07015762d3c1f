"""Bytes are counted by link, and limited ones are shared."""

import asyncio
import time

import pytest

from ebbtide.types.weights import LinkState
from ebbtide.weight_relay import serving as module
from ebbtide.weight_relay.serving import OTHERS, LinkTable, host_of

KIB = 1 << 10


@pytest.mark.alone
async def test_two_readers_of_a_limited_link_get_half_each_and_together_its_rate() -> None:
    links = LinkTable({"a": 1000 * KIB}, 0.0)
    link = links.name("a", "")
    sent = {"greedy": 0, "modest": 0}

    async def read(reader: str) -> None:
        while True:
            await links.turn(link, reader, 10 * KIB)
            sent[reader] += 10 * KIB

    start = time.monotonic()
    tasks = [asyncio.create_task(read(reader)) for reader in ["modest", *["greedy"] * 20]]
    await asyncio.wait(tasks, timeout=1.0)
    lasted = time.monotonic() - start
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert sent["modest"] == pytest.approx(sent["greedy"], rel=0.1)
    assert sum(sent.values()) == pytest.approx(1000 * KIB * lasted, rel=0.15)
    [state] = links.states()
    assert (state.site, state.limit) == ("a", 1000 * KIB)
    assert state.bytes == sum(sent.values())
    assert state.bytes_per_s == pytest.approx(state.bytes / 10, rel=0.2)


async def test_a_reader_that_goes_away_while_it_waits_leaves_its_turn_to_others() -> None:
    links = LinkTable({"*": 100 * KIB}, 0.0)
    link = links.name("a", "")
    await links.turn(link, "one", 20 * KIB)
    gone = asyncio.create_task(links.turn(link, "gone", 1000 * KIB))
    stays = asyncio.create_task(links.turn(link, "stays", KIB))
    await asyncio.wait({gone, stays}, timeout=0.01)
    gone.cancel()
    await asyncio.wait_for(stays, 1.0)
    assert [state.bytes for state in links.states()] == [21 * KIB]


async def test_without_limits_nothing_waits() -> None:
    links = LinkTable({"slow": 1.0}, 0.0)
    link = links.name("a", "")
    await asyncio.wait_for(asyncio.gather(*(links.turn(link, "r", 1 << 20) for _ in range(100))), 1.0)
    shown = links.states()[0]
    assert shown == LinkState(site="a", bytes=100 << 20, bytes_per_s=shown.bytes_per_s, limit=0.0)


async def test_streams_that_begin_together_are_bounded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_LINKS", 2)
    links = LinkTable({}, 0.0)
    names = [links.name(site, "") for site in ("a", "b", "c", "a")]
    assert names == ["a", "b", OTHERS, "a"]
    for name in names:
        await links.turn(name, "r", 1)
    assert [(state.site, state.bytes) for state in links.states()] == [("a", 2), ("b", 1), (OTHERS, 1)]


async def test_links_are_bounded_and_those_without_a_site_are_told_by_their_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MAX_LINKS", 2)
    links = LinkTable({}, 0.0)
    for site, peer in (("a", "ipv4:10.0.0.1:5"), ("", "ipv4:10.0.0.2:5"), ("c", "ipv4:10.0.0.3:5")):
        await links.turn(links.name(site, peer), "r", 1)
    assert [state.site for state in links.states()] == ["10.0.0.2", "a", OTHERS]
    assert [links.name(site, "") for site in ("a", "c")] == ["a", OTHERS]
    assert (host_of("ipv6:[::1]:80"), host_of("unix:")) == ("[::1]", "unix")
