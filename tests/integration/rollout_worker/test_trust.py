"""Whatever a relay sends: what is not signed, announced and whole is never installed, and the old version serves on."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from ebbtide.types.run import Sampling
from ebbtide.types.weights import Manifest
from ebbtide.weights import Signer
from tests.integration.rollout_worker.reading import Reads
from tests.support.waiting import wait_until

House = Any  # the fixture's class lives in conftest.py
SIGNER, STRANGER = Signer(b"s" * 32), Signer(b"t" * 32)


async def refused(house: House, count: int = 1) -> str:
    """Why, once the version was refused; the first one still generates."""
    failed = await house.coordinator.hear("install_failed", count)
    name = f"after{count}"
    house.coordinator.assign(name, Sampling(max_tokens=5))
    await wait_until(lambda: name in house.coordinator.finished)
    assert set(house.coordinator.versions(name)) == {1}
    return str(failed.message)


def altered(manifest: Manifest) -> Manifest:
    signature = bytearray(manifest.signature)
    signature[5] ^= 1
    return msgspec.structs.replace(manifest, signature=bytes(signature))


LIES: dict[str, Callable[[Manifest], Manifest]] = {
    "unsigned": lambda manifest: manifest,
    "signed by another key": STRANGER.sign,
    "with another key's signature in the publisher's name": lambda manifest: msgspec.structs.replace(
        STRANGER.sign(manifest), publisher=SIGNER.public
    ),
    "with an altered signature": lambda manifest: altered(SIGNER.sign(manifest)),
}


@pytest.mark.parametrize("lie", LIES)
async def test_a_manifest_that_the_runs_publisher_did_not_sign_is_refused(house: House, reads: Reads, lie: str) -> None:
    await house.worker()
    version = house.relay.publish(2)
    served = house.relay.served
    house.relay.manifests[2] = LIES[lie](house.relay.manifests[2])
    house.coordinator.install(version, publisher=SIGNER.public)
    assert "sign" in await refused(house)
    assert house.relay.served == served, "nothing was fetched for it"
    house.relay.manifests[2] = SIGNER.sign(house.relay.manifests[2])
    house.coordinator.install(version, publisher=SIGNER.public)
    await house.coordinator.hear("installed", 2)
    assert reads[-1][0] == 2


async def test_without_a_key_a_signature_has_still_to_be_one(house: House) -> None:
    await house.worker()
    version = house.relay.publish(2)
    house.relay.manifests[2] = altered(SIGNER.sign(house.relay.manifests[2]))
    house.coordinator.install(version)
    assert "sign" in await refused(house)


async def test_an_older_version_is_not_taken_for_the_one_announced(house: House) -> None:
    await house.worker()
    version = house.relay.publish(2)
    house.relay.manifests[2] = house.relay.manifests[1]
    house.coordinator.install(version)
    await refused(house)


async def test_tiles_that_never_match_are_given_up_and_a_good_version_goes_in(house: House, reads: Reads) -> None:
    await house.worker(pull_patience_s=0.5)
    house.relay.corrupt = 1 << 30
    house.coordinator.install(house.relay.publish(2))
    await refused(house)
    house.relay.corrupt = 0
    house.coordinator.install(house.relay.publish(3))
    await house.coordinator.hear("installed", 2)
    assert [number for number, _ in reads] == [1, 3]


async def test_a_version_that_the_engine_refused_leaves_a_mirror_for_the_next(house: House, reads: Reads) -> None:
    await house.worker(script={"refuse_version": 2})
    house.coordinator.install(house.relay.publish(2))
    assert "as scripted" in await refused(house)
    house.coordinator.install(house.relay.manifests[1].version)
    house.coordinator.install(house.relay.publish(3))
    await house.coordinator.hear("installed", 3)
    assert [number for number, _ in reads] == [1, 3]
