"""A relay killed before any file operation, while it takes patches, makes a keyframe and composes, comes back whole."""

import asyncio
import os
import shutil
from pathlib import Path

import pytest

from ebbtide.errors import EbbtideError, VersionUnavailable
from ebbtide.weight_relay.service import WeightRelay
from ebbtide.weights import tile_digest, tile_sizes
from tests.integration.weight_relay.crashes import Crash, Crasher
from tests.integration.weight_relay.lines import Line
from tests.support.waiting import wait_until
from tests.unit.weight_relay.relays import SMALL, held, keyframes, patches, publish, publish_all, relay_at

LINE = Line(5, sizes=SMALL, share=0.3)
STREAM = "run", "policy"


async def work(folder: Path) -> None:
    """Version 4 comes by a patch and is made a keyframe, version 5 comes, and the way from 1 is composed."""
    relay = relay_at(folder, keyframe_every=3, keyframe_share=9.0, keep_versions=9, codec_threads=1)
    try:
        await relay.open()
        await publish(relay, LINE[4])
        await settled(relay)
        await publish(relay, LINE[5])
        await relay.reader.ways("run", "policy", 3, [1], bytes_per_s=1.0)
        if relay.keyframes._task is not None:
            await relay.keyframes._task
    except EbbtideError as error:
        raise Crash from error  # composing is given up where its files are
    finally:
        await die(relay)


async def settled(relay: WeightRelay) -> None:
    if relay.keyframes._task is not None:
        await relay.keyframes._task


async def die(relay: WeightRelay) -> None:
    """What is left of a process is what lies on disk; its lock goes with it."""
    tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    relay.codecs.close()
    relay.library.disk.close()


async def check(folder: Path, at_least: int) -> tuple[int, ...]:
    """All that is found again can be read, and is what was published."""
    relay = relay_at(folder, keyframe_every=99, keyframe_share=9.0, keep_versions=9)
    await relay.open()
    found = held(relay)
    assert found[:at_least] == list(range(1, at_least + 1))
    for number in found:
        assert await relay.reader.ways("run", "policy", number, [])
    for number in keyframes(relay):
        for digest in tile_sizes(LINE[number].manifest):
            assert tile_digest(await relay.reader.tile(digest)) == digest
    for base, version in patches(relay):
        for tensor in relay.reader.patch("run", "policy", base, version).tensors:
            for digest in tensor.digests:
                assert tile_digest(await relay.reader.tile(digest)) == digest
    names = {digest.hex() for digest in relay.library.index.on_disk}
    assert {path.name for path in (folder / "tiles").iterdir()} == names
    await relay.close()
    return tuple(found)


async def test_a_relay_killed_at_any_operation_comes_back_with_all_that_was_committed(tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    relay = relay_at(whole, keyframe_every=99, keyframe_share=9.0, keep_versions=9)
    await relay.open()
    await publish_all(relay, Line(3, sizes=SMALL, share=0.3))
    await relay.close()
    outcomes, at = [], 0
    while True:
        root = Path(shutil.copytree(whole, tmp_path / str(at)))
        with pytest.MonkeyPatch.context() as patch:
            crasher = Crasher(patch, at)
            try:
                await work(root)
            except Crash:
                assert crasher.crashed
        outcomes.append(await check(root, 3))
        if not crasher.crashed:
            break
        shutil.rmtree(root)
        at += 1
    assert list(dict.fromkeys(outcomes)) == [(1, 2, 3), (1, 2, 3, 4), (1, 2, 3, 4, 5)]
    assert at > 50
    relay = relay_at(root)
    await relay.open()
    assert keyframes(relay) == [1, 4]
    assert (1, 3) in patches(relay)
    await relay.close()


async def test_a_keyframe_that_its_disk_cannot_take_is_made_when_it_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    relay = relay_at(tmp_path, keyframe_every=2, keyframe_share=9.0, keep_versions=9)
    await relay.open()
    real, broken = os.rename, True

    def rename(path: Path, target: Path) -> Path:
        if broken and str(target).endswith(".manifest"):
            raise OSError(5, "Input/output error")
        real(path, target)
        return target

    await publish(relay, LINE[1])
    monkeypatch.setattr(Path, "rename", rename)
    await publish(relay, LINE[2])
    await publish(relay, LINE[3])
    await settled(relay)
    assert keyframes(relay) == [1]
    with pytest.raises(VersionUnavailable):
        relay.reader.manifest("run", "policy", 4)
    broken = False
    await publish(relay, LINE[4])
    await wait_until(lambda: keyframes(relay) == [1, 4], what="the keyframe")
    await relay.close()
