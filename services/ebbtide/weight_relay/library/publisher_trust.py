"""Pins each run to the key of its publisher, and refuses versions that another key signed.

Invariant: a run's key never changes once it is pinned, by a setting or by the first version staged for it. A pin is
durable before that stage is answered, and outlives the run's versions and the process. It is dropped when the run has
ended.
"""

import asyncio
from collections.abc import Iterable, Mapping

from ebbtide.errors import InvalidRequest, PermissionDenied
from ebbtide.types.ids import check_id
from ebbtide.types.weights import KEY_BYTES, Manifest, Patch
from ebbtide.weight_relay.library.relay_disk import RelayDisk, disk_errors
from ebbtide.weights import check_patch_signature, check_signature


class PublisherTrust:
    def __init__(self, disk: RelayDisk, given: Mapping[str, bytes], *, allow_unsigned: bool) -> None:
        """`given`: keys by run."""
        self._disk = disk
        self._allow_unsigned = allow_unsigned
        self._given = given
        self._pinned: dict[str, bytes] = {}

    async def open(self) -> None:
        """Find the pins. Raises `InvalidRequest` for a malformed pin, without which any key would be trusted, and for
        one that differs from the settings."""
        for run_id, text in (await asyncio.to_thread(self._disk.keys)).items():
            key = self._pinned[run_id] = _key(text, f"data_dir: keys/{run_id}")
            if self._given.get(run_id, key) != key:
                another = f"names another key of run {run_id} than keys/{run_id} in the data_dir; remove one of them"
                raise InvalidRequest(another, field="publisher_keys")

    @property
    def pins(self) -> int:
        """The number of pins on disk."""
        return len(self._pinned)

    def check(self, manifest: Manifest, patch: Patch | None, *, arriving: bool) -> None:
        """Raise `PermissionDenied` unless the run's publisher has signed. A patch from upstream may be unsigned, since
        relays compose patches."""
        pinned = self._key_of(manifest.run_id)
        if not manifest.publisher and not manifest.signature and not pinned:
            if not self._allow_unsigned:
                raise PermissionDenied("the manifest is not signed; sign it, or run the relay with --allow-unsigned")
            return
        self._check_same(manifest)
        check_signature(manifest, pinned)
        if patch is not None and (patch.signature or not arriving):
            check_patch_signature(patch, manifest.publisher)

    async def pin(self, manifest: Manifest) -> None:
        """Pin the run to the key of a checked manifest. Raises `PermissionDenied` if it has another key."""
        self._check_same(manifest)
        key = self._key_of(manifest.run_id)
        if key or not manifest.publisher:
            return
        with disk_errors():
            await asyncio.to_thread(self._disk.put_key, manifest.run_id, manifest.publisher)
        self._pinned[manifest.run_id] = manifest.publisher

    @property
    def runs(self) -> set[str]:
        """The runs with a pin on disk."""
        return set(self._pinned)

    async def unpin(self, run_id: str) -> None:
        """Drop an ended run's pin."""
        if run_id in self._pinned:
            with disk_errors():
                await asyncio.to_thread(self._disk.drop_key, run_id)
            del self._pinned[run_id]

    def _check_same(self, manifest: Manifest) -> None:
        run_id = manifest.run_id
        if (key := self._key_of(run_id)) and key != manifest.publisher:
            held = "--publisher-keys" if run_id in self._given else f"keys/{run_id} in its data_dir"
            raise PermissionDenied(
                f"run {run_id} is signed by another key than the run's publisher's, which the relay has from {held}: "
                "publish under another run id, or change it there and start the relay again"
            )

    def _key_of(self, run_id: str) -> bytes:
        return self._given.get(run_id) or self._pinned.get(run_id, b"")


def known_keys(texts: Iterable[str]) -> dict[str, bytes]:
    """Parse `run=key` pairs, keys in hex. Raises `InvalidRequest`."""
    pairs = [text.partition("=") for text in texts]
    return {check_id(run_id, field="publisher_keys"): _key(key, "publisher_keys") for run_id, _, key in pairs}


def _key(text: str, field: str) -> bytes:
    try:
        key = bytes.fromhex(text)
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise InvalidRequest(f"a key has {2 * KEY_BYTES} hexadecimal digits", field=field)
    return key
