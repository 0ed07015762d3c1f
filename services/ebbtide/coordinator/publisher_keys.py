"""Derives the key that each run signs its weights with from one secret of the fleet.

Invariant: a run's key depends only on the secret and the run's id. It survives restarts of the coordinator and of the
store, and stays the same for a run that the store forgot and that is submitted again: relays and workers trust the
first key that they saw. The store owns the secret; this copy is put back if the store lost it. It is lost with the
process, and read again by the next. Only a run's trainer gets the run's seed, which reveals neither the secret nor
other seeds; neither is logged.
"""

import secrets
from functools import lru_cache
from typing import Final

from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand

from ebbtide.store.store import Store
from ebbtide.types.weights import KEY_BYTES
from ebbtide.weights.manifest import Signer

#: Public keys remembered: each worker is told the run's key with every version.
_KEPT: Final = 1024


class PublisherKeys:
    """Call `keep` first."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._secret = secrets.token_bytes(KEY_BYTES)
        self._public = lru_cache(_KEPT)(lambda run_id: Signer(self._derive(run_id)).public)

    async def keep(self) -> None:
        """Take the store's secret, or give it this one. Raises `StoreUnavailable`."""
        found = await self._store.runs.secret(self._secret)
        if found != self._secret:
            self._secret = found
            self._public.cache_clear()

    async def seed(self, run_id: str) -> bytes:
        """The run's Ed25519 seed, final once a later write to the store is durable. Raises `StoreUnavailable`."""
        await self.keep()
        return self._derive(run_id)

    def public(self, run_id: str) -> bytes:
        """The public key that the run's manifests must be signed with."""
        return self._public(run_id)

    def _derive(self, run_id: str) -> bytes:
        """HKDF-Expand (RFC 5869, section 2.3): the secret is uniform, so the extract step is not needed."""
        return HKDFExpand(SHA256(), KEY_BYTES, b"ebbtide publisher " + run_id.encode()).derive(self._secret)
