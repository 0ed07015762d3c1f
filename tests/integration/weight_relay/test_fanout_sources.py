"""Readers get blobs from relays and static copies near them, and go on when a source or the upstream dies."""

import asyncio
import signal
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from ebbtide.errors import VersionUnavailable
from ebbtide.free_ports import free_port
from ebbtide.rpc.status_table import translated
from ebbtide.types.weights import FetchPath, Holder
from ebbtide.weight_relay import static_copy
from ebbtide.weight_relay.export import ExportSettings, export
from ebbtide.weights import ManifestLimits
from tests.integration.weight_relay.fanout import (
    KIB,
    SECURITY,
    STREAM,
    TILE,
    Reader,
    RunningRelay,
    Version,
    readers,
    running,
)
from tests.shaped_link import ShapedLink
from tests.support.waiting import wait_until


@pytest.fixture
async def home(tmp_path: Path) -> AsyncIterator[RunningRelay]:
    async with running(tmp_path / "home", site="home") as relay:
        yield relay


def has_at_least(process: Any, blobs: int) -> bool:
    return len(process.tiles()) >= blobs


async def test_an_upstream_killed_mid_version_is_followed_again_when_it_is_back(
    process: Any, wire: Any, tmp_path: Path
) -> None:
    version = Version(1)
    digests = [digest for entry in version.manifest.tensors for digest in entry.digests]
    await wire.publish(version.manifest, {digest: bytes(version.blob(digest)) for digest in digests})
    async with ShapedLink(process.address, 1000 * KIB) as link:
        async with (
            running(tmp_path / "away", upstream=link.address) as away,
            readers(1, away.address) as [reader],
        ):
            pull = asyncio.create_task(reader.pull(1))
            await wait_until(lambda: away.arriving().get(1, 99) <= 12, timeout=20, interval=0.001)
            process.end(signal.SIGKILL)
            await process.start()
            await pull
            assert reader.holds(version)
            await wait_until(lambda: away.versions() == [1])
        assert link.received < 1.5 * version.size


async def test_a_relay_killed_mid_version_again_and_again_asks_for_the_rest_alone(
    process: Any, home: RunningRelay
) -> None:
    version = Version(1)
    await version.publish(home.relay)
    async with ShapedLink(home.address, 1000 * KIB) as link:
        for blobs in (4, 10, 16, 22):
            await process.start("--upstream", link.address, "--name", "away")
            await wait_until(partial(has_at_least, process, blobs), timeout=20, interval=0.001)
            process.end(signal.SIGKILL)
        await process.start("--upstream", link.address, "--name", "away")
        reader = Reader("w", process.address)
        await reader.pull(1)
        assert reader.holds(version)
        await reader.close()
        # Each kill may cost the blobs under way: four calls of two, and what lay in the link.
        assert link.received <= version.size + 4 * 12 * TILE


async def test_readers_of_a_site_are_sent_to_its_relay_and_not_over_the_link_again(
    home: RunningRelay, tmp_path: Path
) -> None:
    address = f"127.0.0.1:{free_port()}"
    version = Version(1)
    async with running(
        tmp_path / "away", address, site="away", name="away", advertise=address, upstream=home.address
    ) as away:
        await version.publish(home.relay)
        await wait_until(lambda: away.versions() == [1])
        await wait_until(lambda: [item.done for item in home.fanout.holders.states("run")[0]] == [True])
        reader = Reader("w", home.address, "away")
        assert await reader.pull(1) == {"away": version.size}
        assert reader.holds(version)
        await reader.close()
    assert [(link.site, link.bytes) for link in home.fanout.links.states()] == [("away", version.size)]


async def test_workers_of_a_site_without_a_relay_bring_one_copy_over_its_link_and_share_it(home: RunningRelay) -> None:
    version = Version(1, tiles=48)
    await version.publish(home.relay)
    async with (
        ShapedLink(home.address, 2000 * KIB, 0.005) as link,
        readers(6, link.address, "away", serve=True) as six,
    ):
        taken = await asyncio.gather(*(reader.pull(1) for reader in six))
        assert all(reader.holds(version) for reader in six)
        assert sum(sizes.get("weight-relay", 0) for sizes in taken) == version.size
        assert link.received <= 1.05 * version.size  # with six manifests of small tiles


async def test_workers_go_on_when_the_one_that_brings_it_dies(home: RunningRelay) -> None:
    version = Version(1, tiles=48)
    await version.publish(home.relay)
    async with (
        ShapedLink(home.address, 2000 * KIB, 0.005) as link,
        readers(4, link.address, "away", serve=True) as four,
    ):
        pulls = [asyncio.create_task(four[0].pull(1))]
        await wait_until(lambda: home.fanout.holders.fetching(STREAM, 1), what="the seed")
        pulls += [asyncio.create_task(reader.pull(1)) for reader in four[1:]]
        await wait_until(lambda: link.received >= version.size / 2, timeout=20, interval=0.001)
        pulls[0].cancel()
        await asyncio.gather(pulls[0], return_exceptions=True)
        await four[0].close()
        await asyncio.gather(*pulls[1:])
        assert all(reader.holds(version) for reader in four[1:])
        assert link.received < 2 * version.size


async def test_a_chain_of_three_relays_hands_a_version_on_while_it_comes(home: RunningRelay, tmp_path: Path) -> None:
    version = Version(1)
    async with (
        ShapedLink(home.address, 1000 * KIB) as link,
        running(tmp_path / "middle", upstream=link.address, name="middle") as middle,
        running(tmp_path / "end", upstream=middle.address, name="end") as end,
        readers(1, end.address) as [reader],
    ):
        await version.publish(home.relay)
        pull = asyncio.create_task(reader.pull(1))
        await wait_until(lambda: end.arriving().get(1, 99) <= 12, timeout=20, interval=0.001)
        assert middle.versions() == [], "the middle was to hand on what it had"
        await pull
        assert reader.holds(version)
        assert link.received <= 1.03 * version.size


async def test_a_seed_that_is_dead_is_replaced_by_this_relay_and_avoided(home: RunningRelay) -> None:
    version = Version(1)
    await version.publish(home.relay)
    dead = f"127.0.0.1:{free_port()}"
    await home.find("dead", 1, site="a", address=dead)
    assert await home.find("w0", 1, site="a") == [dead]
    reader = Reader("w0", home.address, "a")
    assert sum((await reader.pull(1)).values()) == version.size
    assert await home.find("w0", 1, site="a") == [""]
    await reader.close()


@pytest.fixture
async def web_server(tmp_path: Path) -> AsyncIterator[str]:
    """The URL of a plain web server over a folder `copies`."""
    folder = tmp_path / "copies"
    folder.mkdir()
    app = web.Application()
    app.router.add_static("/", folder)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", free_port())
    await site.start()
    yield site.name
    await runner.cleanup()


async def test_a_static_copy_takes_the_load_from_the_trainers_relay(web_server: str, tmp_path: Path) -> None:
    first = Version(1)
    second = Version(2, base=first)
    third = Version(3, base=second)  # of which there is no copy
    async with running(tmp_path / "home", static_copies=(f"{web_server}/run",)) as home:
        settings: dict[str, Any] = {"run": "run", "folder": str(tmp_path / "copies" / "run"), "relay": home.address}
        await first.publish(home.relay)
        await export(ExportSettings(security=SECURITY, **settings))
        async with readers(1, home.address) as [reader]:
            assert await reader.pull(1) == {f"{web_server}/run": first.size}
            await second.publish(home.relay)
            await export(ExportSettings(security=SECURITY, dense=False, **settings))
            before = sum(link.bytes for link in home.fanout.links.states())
            assert second.patch is not None
            assert await reader.pull(2) == {f"{web_server}/run": second.patch.size}
            assert sum(link.bytes for link in home.fanout.links.states()) == before
            await third.publish(home.relay)
            assert third.patch is not None
            assert await reader.pull(3) == {"weight-relay": third.patch.size}
            assert reader.holds(third)


async def test_a_relay_of_another_site_reads_static_copies_too(web_server: str, tmp_path: Path) -> None:
    version = Version(1)
    async with running(tmp_path / "home", static_copies=(f"{web_server}/run",)) as home:
        await version.publish(home.relay)
        folder = tmp_path / "copies" / "run"
        await export(ExportSettings(run="run", folder=str(folder), relay=home.address, security=SECURITY))
        before = sum(link.bytes for link in home.fanout.links.states())
        async with running(tmp_path / "away", upstream=home.address) as away:
            await wait_until(lambda: away.versions() == [1])
        assert sum(link.bytes for link in home.fanout.links.states()) == before


async def test_a_static_copy_can_be_followed_like_a_relay(
    home: RunningRelay, web_server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(static_copy, "POLL_S", 0.05)
    first = Version(1)
    second = Version(2, base=first)
    third = Version(3, base=second)
    settings: dict[str, Any] = {"run": "run", "folder": str(tmp_path / "copies" / "run"), "relay": home.address}
    async with running(tmp_path / "away", upstream=f"{web_server}/run") as away, readers(1, away.address) as [reader]:
        await first.publish(home.relay)
        await export(ExportSettings(security=SECURITY, **settings))
        await wait_until(lambda: away.versions() == [1])
        for version in (second, third):
            await version.publish(home.relay)
            await export(ExportSettings(security=SECURITY, dense=False, **settings))
        await reader.pull(3)
        assert reader.holds(third)
        await wait_until(lambda: away.versions() == [1, 2, 3])
        with pytest.raises(VersionUnavailable), translated("relay"):
            await away.find("w", 9)
    async with running(tmp_path / "late", upstream=f"{web_server}/run") as late, readers(1, late.address) as [reader]:
        await reader.pull(0)
        assert reader.holds(third)


async def test_a_static_copy_may_begin_with_a_version_that_has_a_parent(web_server: str, tmp_path: Path) -> None:
    first = Version(1)
    second = Version(2, base=first)
    url = f"{web_server}/run"
    async with running(tmp_path / "home", keyframe_every=1) as home:
        for version in (first, second):
            await version.publish(home.relay)
        await wait_until(lambda: 2 in home.relay.library.index.keyframes(STREAM), what="the keyframe")
        folder = tmp_path / "copies" / "run"
        await export(ExportSettings(run="run", folder=str(folder), relay=home.address, security=SECURITY))
    assert not (folder / "version-1.msgpack").exists()
    async with running(tmp_path / "away", upstream=url) as away:
        await wait_until(lambda: away.versions() == [2])
    upstream = static_copy.StaticUpstream(url, SECURITY, Holder(name="reader"), ManifestLimits())
    target = await upstream.manifest(STREAM, 2)
    _, patches = await upstream.way(FetchPath(start=1, keyframe=False, via=(2,)), target)
    assert len(patches) == 1
    with pytest.raises(VersionUnavailable, match="no patch from version 7 to 2"):
        await upstream.way(FetchPath(start=7, keyframe=False, via=(2,)), target)
    await upstream.close()


async def test_only_what_is_here_can_be_exported(home: RunningRelay, tmp_path: Path) -> None:
    first = Version(1)
    second = Version(2, base=first)
    for version in (first, second):
        await version.publish(home.relay)
    settings: dict[str, Any] = {"run": "run", "relay": home.address, "security": SECURITY}
    with pytest.raises(VersionUnavailable, match="only keyframes"):
        await export(ExportSettings(folder=str(tmp_path / "a"), version=2, **settings))
    with pytest.raises(VersionUnavailable, match="no parent"):
        await export(ExportSettings(folder=str(tmp_path / "b"), version=1, dense=False, **settings))
    await export(ExportSettings(folder=str(tmp_path / "c"), version=2, dense=False, **settings))
    assert second.patch is not None
    assert (tmp_path / "c" / "00000.blobs").stat().st_size == second.patch.size
