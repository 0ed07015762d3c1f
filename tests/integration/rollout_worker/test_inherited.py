"""What lies in a mirror is not believed for having lain there: changed bytes are fetched again, and headers mended."""

import os
from pathlib import Path
from typing import Any

import pytest

from ebbtide.types.run import Sampling
from tests.integration.rollout_worker.reading import Reads, tensors
from tests.support.waiting import wait_until

House = Any  # the fixture's class lives in conftest.py


def weights(house: House) -> Path:
    (found,) = house.mirrors.glob("mirror-*/weights")
    return Path(found)


def flip(file: Path, offset: int) -> None:
    with file.open("r+b") as opened:
        opened.seek(offset, os.SEEK_SET if offset >= 0 else os.SEEK_END)
        byte = opened.read(1)[0]
        opened.seek(-1, os.SEEK_CUR)
        opened.write(bytes([byte ^ 0x40]))


@pytest.mark.parametrize(("offset", "fetched"), [(-1, 1), (3, 0)])
async def test_what_changed_while_no_worker_lived_is_never_installed(
    house: House, reads: Reads, offset: int, fetched: int
) -> None:
    process = await house.process()
    right = tensors(weights(house))
    process.kill()
    process.wait(10)
    flip(weights(house), offset)
    served = house.relay.served
    house.coordinator.attaches.clear()
    house.coordinator.heard.clear()
    await house.worker(version=0)
    house.coordinator.install(house.relay.manifests[1].version)
    await house.coordinator.hear("installed")
    assert reads == [(1, right)]
    assert house.relay.served - served == fetched
    assert "install_failed" not in house.coordinator.heard


async def test_a_file_that_the_engine_refused_is_mended_before_the_next_try(house: House, reads: Reads) -> None:
    await house.worker()
    house.relay.publish(2)
    version = house.relay.manifests[2].version
    for offset in (3, -1):
        flip(weights(house), offset)
    house.coordinator.install(version)
    assert "safetensors" in (await house.coordinator.hear("install_failed")).message
    house.coordinator.install(version)
    await house.coordinator.hear("installed", 2)
    assert [number for number, _ in reads] == [1, 2]
    assert len(house.coordinator.heard["install_failed"]) == 1
    house.coordinator.assign("r1", Sampling(max_tokens=5))
    await wait_until(lambda: "r1" in house.coordinator.finished)


async def test_a_version_that_the_engine_refuses_again_is_looked_at_once(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ebbtide.transfer import Mirror

    looks, doubt = [0], Mirror.doubt

    def counted(mirror: Mirror) -> None:
        looks[0] += 1
        doubt(mirror)

    monkeypatch.setattr(Mirror, "doubt", counted)
    await house.worker(script={"refuse_version": 2})
    version = house.relay.publish(2)
    for count in (1, 2, 3):
        house.coordinator.install(version)
        await house.coordinator.hear("install_failed", count)
    assert looks == [1]
