"""Versions from upstream are readable while they come."""

import asyncio
import errno
from pathlib import Path

import msgspec
import pytest

from ebbtide.errors import NotReady, VersionUnavailable
from ebbtide.weight_relay.library.relay_disk import RelayDisk
from ebbtide.weight_relay.retention import Stream
from ebbtide.weight_relay.service import WeightRelay
from tests.fakes.clocks import SetClock
from tests.integration.weight_relay.lines import Line
from tests.support.waiting import wait_until
from tests.unit.weight_relay.relays import SMALL, held, publish, put, relay_at


async def opened(folder: Path, clock: SetClock | None = None) -> WeightRelay:
    relay = relay_at(folder, clock)
    await relay.open()
    return relay


async def test_what_arrives_is_shown_at_once_and_its_blobs_are_waited_for(tmp_path: Path) -> None:
    relay, line = await opened(tmp_path), Line(2, sizes=SMALL)
    missing = await relay.intake.begin(line[1].manifest, arriving=True)
    assert relay.reader.manifest("run", "policy", 1) == line[1].manifest
    assert [way.start for way in await relay.reader.ways("run", "policy", 1, [])] == [1]
    readers = [asyncio.create_task(relay.reader.tile(digest)) for digest in missing]
    for digest in reversed(missing):
        assert not any(reader.done() for reader, of in zip(readers, missing, strict=True) if of == digest)
        await relay.intake.put(digest, line[1].tiles[digest])
        reader = readers[missing.index(digest)]
        assert await asyncio.wait_for(reader, 5) == line[1].tiles[digest]
    with pytest.raises(VersionUnavailable):
        relay.reader.manifest("run", "policy", 0)
    await relay.intake.commit("run", line[1].manifest.version)
    assert relay.reader.manifest("run", "policy", 0) == line[1].manifest
    await relay.close()


async def test_a_patch_may_arrive_on_a_base_that_arrives_and_is_committed_after_it(tmp_path: Path) -> None:
    relay, line = await opened(tmp_path), Line(2, sizes=SMALL)
    await put(relay, line[1], arriving=True)
    await put(relay, line[2], arriving=True)
    assert relay.reader.patch("run", "policy", 1, 2) == line[2].patch
    assert [(way.start, way.via) for way in await relay.reader.ways("run", "policy", 2, [])] == [(1, (2,))]
    with pytest.raises(NotReady, match="base of the patch"):
        await relay.intake.commit("run", line[2].manifest.version)
    await relay.intake.commit("run", line[1].manifest.version)
    await relay.intake.commit("run", line[2].manifest.version)
    assert held(relay) == [1, 2]
    await relay.close()


async def test_a_patch_that_was_composed_upstream_needs_no_signature(tmp_path: Path) -> None:
    relay, line = await opened(tmp_path), Line(2, sizes=SMALL)
    await publish(relay, line[1])
    assert line[2].patch is not None
    assert await relay.intake.begin(
        line[2].manifest, msgspec.structs.replace(line[2].patch, signature=b""), arriving=True
    )
    await relay.close()


async def test_who_waits_for_what_is_given_up_is_told(tmp_path: Path) -> None:
    relay, line = await opened(tmp_path), Line(1, sizes=SMALL)
    first, second = await relay.intake.begin(line[1].manifest, arriving=True)
    await relay.intake.put(first, line[1].tiles[first])
    reader = asyncio.create_task(relay.reader.tile(second))
    await asyncio.sleep(0)
    await relay.intake.abandon("run", "policy", 1)
    with pytest.raises(VersionUnavailable):
        await asyncio.wait_for(reader, 5)
    assert not list((tmp_path / "tiles").iterdir())
    assert not list((tmp_path / "arriving").rglob("*.stage"))
    await relay.close()


async def test_what_has_come_is_not_wanted_again_after_a_restart(tmp_path: Path) -> None:
    relay, line = await opened(tmp_path), Line(2, sizes=SMALL)
    await publish(relay, line[1])
    first, second = await relay.intake.begin(line[2].manifest, line[2].patch, arriving=True)
    await relay.intake.put(first, line[2].blobs[first])
    await relay.close()
    relay = await opened(tmp_path)
    assert await relay.reader.tile(first) == line[2].blobs[first]
    assert await relay.intake.begin(line[2].manifest, line[2].patch, arriving=True) == [second]
    await relay.intake.put(second, line[2].blobs[second])
    await relay.intake.commit("run", line[2].manifest.version)
    assert not list((tmp_path / "arriving").rglob("*.stage"))
    await relay.close()


async def test_a_stage_that_somebody_reads_is_no_dead_one(tmp_path: Path) -> None:
    clock = SetClock()
    relay, line = await opened(tmp_path, clock), Line(1, sizes=SMALL)
    first, second = await relay.intake.begin(line[1].manifest, arriving=True)
    await relay.intake.put(first, line[1].tiles[first])
    clock.now = 500.0
    await relay.reader.tile(first)
    clock.now = 1000.0
    await relay.collector.drop_dead_stages()
    assert await relay.intake.begin(line[1].manifest, arriving=True) == [second]
    clock.now = 2000.0
    await relay.collector.drop_dead_stages()
    await wait_until(lambda: not list((tmp_path / "tiles").iterdir()), what="the end of a silent stage")
    await relay.close()


async def test_watchers_of_everything_hear_of_all_runs(tmp_path: Path) -> None:
    relay = await opened(tmp_path)
    versions = relay.reader.watch()
    for run_id in ("run", "other"):
        line = Line(1, sizes=SMALL, run_id=run_id)
        await put(relay, line[1])
        await relay.intake.commit(run_id, line[1].manifest.version)
        assert (await anext(versions)).run_id == run_id
    await relay.close()


async def test_what_is_arriving_and_does_not_fit_a_lowered_budget_is_let_go_at_the_start(tmp_path: Path) -> None:
    relay, line = await opened(tmp_path), Line(1, sizes={"w": ("BF16", "<u2", 600_000)})
    first, *_ = await relay.intake.begin(line[1].manifest, arriving=True)
    await relay.intake.put(first, line[1].tiles[first])
    await relay.close()
    relay = relay_at(tmp_path, budget_bytes=1 << 20)
    await relay.open()
    assert not list((tmp_path / "arriving").rglob("*.stage"))
    assert not list((tmp_path / "tiles").iterdir())
    with pytest.raises(VersionUnavailable):
        relay.reader.manifest("run", "policy", 1)
    await relay.close()


async def test_a_disk_that_fails_does_not_end_the_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SetClock()
    relay, line = relay_at(tmp_path, clock, stage_ttl_s=0.04), Line(1, sizes=SMALL)
    await relay.open()
    await relay.intake.begin(line[1].manifest, arriving=True)
    drop, refused = RelayDisk.drop_arrival, list[OSError]()

    def fails_once(disk: RelayDisk, stream: Stream, version: int) -> None:
        if not refused:
            refused.append(OSError(errno.EIO, "Input/output error"))
            raise refused[0]
        drop(disk, stream, version)

    monkeypatch.setattr(RelayDisk, "drop_arrival", fails_once)
    clock.now = 1.0
    running = asyncio.create_task(relay.run())
    await wait_until(
        lambda: running.done() or not list((tmp_path / "arriving").rglob("*.stage")), what="the dead stage's end"
    )
    assert refused
    assert not running.done()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await relay.close()
