"""The keys that runs publish their weights under: all derived from one secret of the fleet.

Invariant: a run's key is a function of the secret and the run's id alone, so it is the same in every life of the
coordinator and of the store, and for a run that the store forgot and that is submitted again: relays and workers hold
on to the first key that they saw. The secret is the store's; what is here is a copy, put back where the store has lost
it. It dies with the process, and the next reads it from the store. Only a run's trainer is told the run's seed, which
says nothing of the secret or of other runs' seeds; nobody logs either.
"""

import secrets
from functools import lru_cache
from typing import Final

from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand

from ebbtide.store.store import Store
from ebbtide.types.weights import KEY_BYTES
from ebbtide.weights.signing import Signer

#: Runs whose public keys are remembered: each worker is told the key with every version.
_KEPT: Final = 1024


class PublisherKeys:
    """`keep` it once before anything else."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._secret = secrets.token_bytes(KEY_BYTES)
        self._public = lru_cache(_KEPT)(lambda run_id: Signer(self._derive(run_id)).public)

    async def keep(self) -> None:
        """See that the store and this have the same secret. Raises `StoreUnavailable`."""
        found = await self._store.runs.secret(self._secret)
        if found != self._secret:
            self._secret = found
            self._public.cache_clear()

    async def seed(self, run_id: str) -> bytes:
        """The 32 secret bytes of the run's Ed25519 key. It is for good once what comes behind it in the store is
        durable. Raises `StoreUnavailable`.
        """
        await self.keep()
        return self._derive(run_id)

    def public(self, run_id: str) -> bytes:
        """The public key of the run: what its manifests must be signed by."""
        return self._public(run_id)

    def _derive(self, run_id: str) -> bytes:
        """HKDF-Expand (RFC 5869, section 2.3): the secret is uniform, so there is nothing to extract from it."""
        return HKDFExpand(SHA256(), KEY_BYTES, b"ebbtide publisher " + run_id.encode()).derive(self._secret)
