"""The relay's directory.

    tiles/<digest>                          one tile, named by its digest
    versions/<run>/<policy>/<version>.manifest
    staging/                                files being written

Invariant: a manifest lies under `versions/` only after all of its tiles were fsynced, and it appears there by one
rename. So whatever a dead process leaves behind is a whole version, or files that no manifest names, which `load`
deletes.
One process owns the directory at a time (a file lock, released by the system when the process dies).
All calls block; the service makes them from threads.
"""

import contextlib
import errno
import fcntl
import os
import secrets
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import msgspec

from ebbtide.errors import EbbtideError, InvalidRequest, NoCapacity, Unavailable
from ebbtide.runtime import fsync
from ebbtide.types.weights import Manifest
from ebbtide.weights import check_manifest, tile_sizes

_SUFFIX: Final = ".manifest"
#: Syncs at once: file systems write several to the disk in one go.
_SYNCS: Final = 16
_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final = msgspec.msgpack.Decoder(Manifest)


class Refusal(msgspec.Struct, frozen=True):
    """A file that was found at the start and is no whole version, and why."""

    path: str
    reason: str


class Disk:
    def __init__(self, root: Path) -> None:
        """Take the directory. Raises `InvalidRequest` if another relay has it, or nobody can write there."""
        self._tiles, self._versions, self._staging = root / "tiles", root / "versions", root / "staging"
        try:
            for folder in (self._tiles, self._versions, self._staging):
                folder.mkdir(parents=True, exist_ok=True)
            self._lock = (root / "lock").open("wb")
        except OSError as error:
            text = f"{root} cannot be written ({error.strerror}); name another directory"
            raise InvalidRequest(text, field="data_dir") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.close()
            raise InvalidRequest(
                f"{root} is in use by another weight-relay; give this one its own", field="data_dir"
            ) from None

    def close(self) -> None:
        self._lock.close()

    # -- start ---------------------------------------------------------------------------------------------------

    def load(self) -> tuple[list[Manifest], list[Refusal]]:
        """The whole versions that lie here. Everything else is deleted, and what looked like a version is reported."""
        for leftover in self._staging.iterdir():
            leftover.unlink()
        on_disk = {entry.name: entry.stat().st_size for entry in os.scandir(self._tiles)}
        whole: list[Manifest] = []
        refused: list[Refusal] = []
        used: set[str] = set()
        for path in sorted(self._versions.glob(f"*/*/*{_SUFFIX}")):
            try:
                manifest = self._read_manifest(path, on_disk)
            except (EbbtideError, msgspec.MsgspecError) as error:
                refused.append(Refusal(str(path.relative_to(self._versions)), str(error)))
                path.unlink()
                continue
            whole.append(manifest)
            used.update(digest.hex() for digest in tile_sizes(manifest))
        for name in on_disk.keys() - used:
            (self._tiles / name).unlink()
        return whole, refused

    def _read_manifest(self, path: Path, on_disk: dict[str, int]) -> Manifest:
        manifest = _DECODER.decode(path.read_bytes())
        check_manifest(manifest)
        if self._manifest_path(manifest.run_id, manifest.version.policy, manifest.version.version) != path:
            raise InvalidRequest("lies under another version's name")
        for digest, size in tile_sizes(manifest).items():
            if (found := on_disk.get(digest.hex())) != size:
                raise InvalidRequest(f"its tile {digest.hex()} has {found} bytes on disk, not {size}")
        return manifest

    # -- tiles ---------------------------------------------------------------------------------------------------

    def put_tile(self, digest: bytes, data: bytes) -> None:
        """Write a tile that was verified; it need not be durable before `sync_tiles`."""
        staged = self._staging / secrets.token_hex(8)
        staged.write_bytes(data)
        staged.rename(self._tiles / digest.hex())

    def get_tile(self, digest: bytes) -> bytes:
        """The tile as it lies on disk, not verified. Raises `OSError`."""
        return (self._tiles / digest.hex()).read_bytes()

    def sync_tiles(self, digests: Iterable[bytes]) -> None:
        """Make tiles durable. One that was dropped meanwhile is passed over: no version can want it."""
        with ThreadPoolExecutor(_SYNCS) as pool:
            list(pool.map(self._sync_tile, digests))
        fsync(self._tiles)

    def _sync_tile(self, digest: bytes) -> None:
        with contextlib.suppress(FileNotFoundError):
            fsync(self._tiles / digest.hex())

    def drop_tiles(self, digests: Iterable[bytes]) -> None:
        for digest in digests:
            (self._tiles / digest.hex()).unlink(missing_ok=True)

    # -- versions ------------------------------------------------------------------------------------------------

    def put_manifest(self, manifest: Manifest) -> None:
        """Make a version visible after a restart, durably; its tiles must have been synced."""
        path = self._manifest_path(manifest.run_id, manifest.version.policy, manifest.version.version)
        path.parent.mkdir(parents=True, exist_ok=True)
        staged = self._staging / secrets.token_hex(8)
        staged.write_bytes(_ENCODER.encode(manifest))
        fsync(staged)
        staged.rename(path)
        for folder in (path.parent, path.parent.parent, self._versions):
            fsync(folder)

    def drop_manifest(self, run_id: str, policy: str, version: int) -> None:
        """Forget a version, durably, before its tiles go."""
        path = self._manifest_path(run_id, policy, version)
        path.unlink(missing_ok=True)
        fsync(path.parent)
        for folder in (path.parent, path.parent.parent):
            if not any(folder.iterdir()):
                folder.rmdir()

    def _manifest_path(self, run_id: str, policy: str, version: int) -> Path:
        return self._versions / run_id / policy / f"{version:010d}{_SUFFIX}"


@contextlib.contextmanager
def disk_errors() -> Iterator[None]:
    """Tell a full disk from one that fails; a missing file is the caller's own affair."""
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise NoCapacity(
                "the relay's disk is full; free space or lower --budget-bytes", retry_after_s=10.0
            ) from None
        raise Unavailable(f"the relay's disk fails ({error.strerror}); see its log") from error
