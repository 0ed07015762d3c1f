"""What a run's key hangs on."""

import hashlib
import hmac
from types import SimpleNamespace
from typing import Any

from ebbtide.coordinator.run_recovery import PublisherKeys
from ebbtide.weights.manifest import Signer

SECRET = bytes(range(32))


def publishers(secret: bytes) -> PublisherKeys:
    """With a store that has this secret."""

    async def stored(_ours: bytes) -> bytes:
        return secret

    store: Any = SimpleNamespace(runs=SimpleNamespace(secret=stored))
    return PublisherKeys(store)


async def test_the_seed_is_of_the_secret_and_the_run_as_in_rfc_5869() -> None:
    """Relays hold on to a run's first key, so that another way to it would cut running jobs off."""
    expected = hmac.digest(SECRET, b"ebbtide publisher r.1\x01", hashlib.sha256)
    assert await publishers(SECRET).seed("r.1") == expected
    assert await publishers(SECRET).seed("r.2") != expected
    assert await publishers(SECRET[::-1]).seed("r.1") != expected


async def test_workers_are_told_the_key_of_the_seed_that_the_trainer_has_now() -> None:
    made = publishers(SECRET)
    before = made.public("r")  # of a secret that the store did not take
    seed = await made.seed("r")
    assert made.public("r") == Signer(seed).public != before
