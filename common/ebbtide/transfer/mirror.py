"""Keeps the host's copy of a version, one safetensors file of whole tensors in memory, and changes it tile by tile.

Invariant: at every instruction, a tile whose state is KNOWN has the digest recorded for it. Its state becomes WRITING
before it is written, and digest and state are set after; a state is one byte, so it is never half written. A process
killed anywhere leaves each tile KNOWN and right, or WRITING. `mend` checks the latter again, and all tiles of a mirror
that no process used for a while, or that is in doubt. Only verified tiles are written. Only the caller that has `hold`
may `apply`, in any number of threads, each place in one of them. The count of beats is a hint that the holder writes.
"""

import asyncio
import fcntl
import json
import mmap
import os
import threading
import time
from bisect import bisect_right
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Protocol, TypeAlias

import msgspec
import numpy as np
from blake3 import blake3
from msgspec import Meta

from ebbtide.errors import ChunkCorrupt, InvalidRequest, NoCapacity
from ebbtide.rpc.backoff import pauses
from ebbtide.transfer.element_changes import ElementChanges, leads
from ebbtide.transfer.shared_folder import UNCHECKED, SharedFolder, refused, reserve
from ebbtide.types.weights import DIGEST_BYTES, Manifest, TensorEntry
from ebbtide.weights import FileLayout, NamedTensor, Place, TileTask, places, same_geometry, tile_digest
from ebbtide.weights.geometry import Bytes
from ebbtide.weights.tensors import unit_width
from ebbtide.weights.tiles import tile_size

if TYPE_CHECKING:
    from ebbtide.weights.patch import TileCodec


Buffer: TypeAlias = bytearray | mmap.mmap
#: Writes a file's whole content to a descriptor.
Writer: TypeAlias = Callable[[int], None]
#: Marks all entries of a table as not known.
Distrust: TypeAlias = Callable[[Buffer], None]
#: The most bytes read of a small file.
_SMALL: Final = 1 << 16


class MirrorMemory(Protocol):
    """Provides a mirror's memory: private to this process, or in files that this user's processes share.

    Invariant: `weights` is a file of `size` bytes. A shared one has memory reserved for each byte, so that no write to
    its mapping can fail. `table` is all zeros when the weights were laid out again; it is distrusted before any process
    sees it when they had no user. The header is right when a process has joined. Small files are replaced whole.
    """

    weights: int  # a descriptor of the file
    table: Buffer

    def read(self, name: str) -> bytes:
        """Read a small file; empty if there is none."""
        ...

    def replace(self, name: str, write: Writer) -> None:
        """Replace a file at once by what `write` writes. If that raises, the old file stays."""
        ...

    def open(self, name: str) -> int | None:
        """Open a file; None if there is none. The caller closes the descriptor."""
        ...

    def close(self) -> None: ...


class PrivateMemory:
    """Memory that ends with the process. Parts that are never written take none."""

    def __init__(self, size: int, table: int, header: bytes) -> None:
        """Raises `NoCapacity` if there is no room."""
        self.table: Buffer = bytearray(table)
        self._files: dict[str, int] = {}

        def lay_out(file: int) -> None:
            os.ftruncate(file, size)
            os.pwrite(file, header, 0)

        try:
            self.weights = _memory("weights", lay_out)
        except OSError as error:
            text = f"{size} bytes of weights cannot be kept in memory ({error.strerror}): raise the limit that says so"
            raise NoCapacity(text, retry_after_s=10.0) from None

    def read(self, name: str) -> bytes:
        return os.pread(self._files[name], _SMALL, 0) if name in self._files else b""

    def replace(self, name: str, write: Writer) -> None:
        new = _memory(name, write)
        if (old := self._files.get(name)) is not None:
            os.close(old)
        self._files[name] = new

    def open(self, name: str) -> int | None:
        return os.dup(self._files[name]) if name in self._files else None

    def close(self) -> None:
        for file in (self.weights, *self._files.values()):
            os.close(file)


def _memory(name: str, write: Writer) -> int:
    """Return a descriptor of memory that `write` has filled."""
    file = os.memfd_create(f"ebbtide-{name}")
    try:
        write(file)
    except BaseException:
        os.close(file)
        raise
    return file


class SharedMemory:
    """Files below `folder` for the mirrors with the same `made` (32 bytes); see `SharedFolder`."""

    def __init__(self, folder: Path, made: bytes, size: int, table: int, header: bytes, distrust: Distrust) -> None:
        """Raises `InvalidRequest` for a folder that is not this user's alone, `NoCapacity` if it has no room."""
        self._folder = SharedFolder(folder, made)
        with ExitStack() as undo:
            undo.callback(self._folder.leave)
            try:
                self.weights = self._folder.open("weights")
                undo.callback(os.close, self.weights)
                self.table: Buffer = self._lay_out(folder, made, size, table, header, distrust)
            except OSError as error:
                raise refused(folder, error) from None
            undo.pop_all()

    def _lay_out(
        self, folder: Path, made: bytes, size: int, table: int, header: bytes, distrust: Distrust
    ) -> mmap.mmap:
        """Prepare the files, and return the table."""
        digests = self._folder.open("digests")
        try:
            fcntl.flock(digests, fcntl.LOCK_EX)  # until the files are ready
            sizes = os.fstat(digests).st_size, os.fstat(self.weights).st_size
            if sizes != (table, size) or os.pread(digests, len(made), 0) != made:
                os.ftruncate(digests, 0)
                reserve(digests, table, str(folder))
                reserve(self.weights, size, str(folder))
                os.pwrite(self.weights, header, 0)
                os.pwrite(digests, made, 0)  # last: a process killed earlier leaves it to be done again
            if os.pread(self.weights, len(header), 0) != header:
                os.pwrite(self.weights, header, 0)
            mapped = mmap.mmap(digests, table)
            if (found := self._folder.find(UNCHECKED)) is not None:
                os.close(found)
                distrust(mapped)
                self._folder.drop("changes")
                self._folder.drop(UNCHECKED)  # last, too
            return mapped
        finally:
            fcntl.flock(digests, fcntl.LOCK_UN)  # the mapping keeps a copy of the descriptor
            os.close(digests)

    def read(self, name: str) -> bytes:
        if (file := self._folder.find(name)) is None:
            return b""
        with os.fdopen(file, "rb") as whole:
            return whole.read(_SMALL)

    def replace(self, name: str, write: Writer) -> None:
        new = self._folder.open(f"{name}.new")
        try:
            os.ftruncate(new, 0)
            write(new)
            self._folder.rename(f"{name}.new", name)
        except BaseException:
            with suppress(OSError):
                os.ftruncate(new, 0)  # give back the room that it took
            raise
        finally:
            os.close(new)

    def open(self, name: str) -> int | None:
        return self._folder.find(name)

    def close(self) -> None:
        os.close(self.weights)
        self._folder.leave()


_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")
_CONTEXT: Final = "ebbtide 2026-11 geometry"
#: Bytes of the digests' file before them: the geometry, written when all else is in place, and the count of beats.
_HEAD: Final = 64
_UNKNOWN, _WRITING, _KNOWN = 0, 1, 2
#: Versions remembered: of broken pulls, each of which left some tiles.
_VERSIONS: Final = 8
#: Threads that check tiles again, and the tiles that are worth another thread.
_MENDERS: Final = 4
_FEW: Final = 64


#: The remembered versions in their file: run and policy, versions.
_Remembered: TypeAlias = tuple[tuple[str, str], list[Annotated[int, Meta(ge=1, le=(1 << 32) - 1)]]]


class _Scratch(threading.local):
    """What each thread applies patches with. It holds nothing between two tiles."""

    def __init__(self, tile_bytes: int) -> None:
        self.bytes: Bytes = np.empty(tile_bytes, np.uint8)
        self._codecs: dict[int, TileCodec] = {}

    def codec(self, width: int) -> "TileCodec":
        """For units of `width` bytes. Its modules are imported late, with the first patch."""
        if width not in self._codecs:
            from ebbtide.weights.patch import TileCodec

            self._codecs[width] = TileCodec(width)
        return self._codecs[width]


class Mirror:
    def __init__(self, manifest: Manifest, folder: Path | None) -> None:
        """Make room for a policy's versions in `manifest`'s geometry: in `folder`, shared by this user's processes that
        name it while one of them lives; without a folder, in memory of this process alone.

        Raises `InvalidRequest` for a folder that others may enter, `NoCapacity` if it has no room.
        """
        self.layout = FileLayout(manifest)
        self.manifest = manifest
        self._first = list(accumulate((len(entry.digests) for entry in manifest.tensors), initial=0))
        tiles = self._first[-1]
        room = self.layout.size, _HEAD + tiles * (DIGEST_BYTES + 1), self.layout.header
        self._memory: MirrorMemory = (
            PrivateMemory(*room) if folder is None else SharedMemory(folder, made(manifest), *room, _distrust)
        )
        try:
            self._file: Bytes = np.frombuffer(mmap.mmap(self._memory.weights, self.layout.size), np.uint8)
        except OSError as error:
            self._memory.close()
            text = f"{self.layout.size} bytes of weights cannot be mapped ({error.strerror}): raise the limit of memory"
            raise NoCapacity(text, retry_after_s=10.0) from None
        table = np.frombuffer(self._memory.table, np.uint8)[_HEAD:]
        self._digests = table[: tiles * DIGEST_BYTES].reshape(tiles, DIGEST_BYTES)
        self._states = table[tiles * DIGEST_BYTES :]
        self._beats = np.frombuffer(self._memory.table, np.uint64, 1, DIGEST_BYTES)
        self._scratch = _Scratch(self.layout.tile_bytes)
        self._rows = threading.Lock()
        self._changes: int | None = None  # the file last given out
        self._closed = False

    @property
    def path(self) -> Path:
        """The safetensors file, for this user's processes on this host. The path is valid until `close`."""
        return _descriptor(self._memory.weights)

    @asynccontextmanager
    async def hold(self, *, shared: bool = False) -> AsyncIterator[None]:
        """Keep all others, in any process, from changing the weights. `shared`: others may read them too."""
        kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        lock = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            for pause in pauses(0.002, 0.1):
                try:
                    fcntl.flock(lock, kind | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    await asyncio.sleep(pause)
            if not shared:
                self.beat()
            try:
                yield
            finally:
                fcntl.flock(lock, fcntl.LOCK_UN)  # also where a forked child has inherited the descriptor
        finally:
            os.close(lock)

    def beat(self) -> None:
        """Show waiting processes that the holder makes progress. Of two beats at once one may be lost."""
        self._beats += np.uint64(1)

    @property
    def beats(self) -> int:
        """A count that changes when a process holds the mirror alone, or makes progress with it."""
        return int(self._beats[0])

    # -- what is here --------------------------------------------------------------------------------------------

    def held(self) -> dict[Place, bytes]:
        """The digests of the tiles that are known now."""
        known, table = self._states.tobytes(), self._digests.tobytes()
        found: dict[Place, bytes] = {}
        for row, place in enumerate(places(self.manifest)):
            if known[row] == _KNOWN:
                found[place] = table[row * DIGEST_BYTES : (row + 1) * DIGEST_BYTES]
        return found

    def holds(self, manifest: Manifest, wanted: Iterable[Place] | None = None) -> bool:
        """Whether every tile, or every `wanted` one, is that version's."""
        if not same_geometry(manifest, self.manifest):
            return False
        digests = np.frombuffer(b"".join(digest for entry in manifest.tensors for digest in entry.digests), np.uint8)
        right = (self._states == _KNOWN) & (self._digests == digests.reshape(self._digests.shape)).all(1)
        return bool((right if wanted is None else right[self._rows_of(wanted)]).all())

    def versions(self, run_id: str, policy: str) -> list[int]:
        """The versions of a policy that the tiles come from, as last remembered; a hint."""
        with suppress(msgspec.MsgspecError, UnicodeDecodeError):
            whose, numbers = msgspec.json.decode(self._memory.read("versions"), type=_Remembered)
            return numbers[-_VERSIONS:] if whose == (run_id, policy) else []
        return []

    def remember(self, run_id: str, policy: str, versions: Iterable[int]) -> None:
        """Remember the versions, the latest last, unless memory is full."""
        text = json.dumps([[run_id, policy], list(dict.fromkeys(versions))[-_VERSIONS:]]).encode()
        with suppress(OSError):
            self._memory.replace("versions", lambda file: _write(file, text))

    def read(self, digest: bytes) -> bytes | None:
        """A dense tile, verified; None if it is not here, or is being overwritten."""
        if len(digest) != DIGEST_BYTES:
            return None
        key = np.frombuffer(digest, np.uint64)
        rows = np.flatnonzero(self._digests.view(np.uint64)[:, 0] == key[0])
        for row in rows[self._states[rows] == _KNOWN][:4].tolist():
            data = self.layout.read(self._file, *self._place(row)).tobytes()
            if tile_digest(data) == digest:
                return data
        return None

    def tensors(self) -> Iterator[NamedTensor]:
        """Views of the whole tensors, by name. They outlive `close`, and show later writes."""
        data, begin = self._file.data, len(self.layout.header)
        header = json.loads(self.layout.header[8:])
        for name, tensor in header.items():
            start, end = tensor["data_offsets"]
            shape = tuple(tensor["shape"])
            yield NamedTensor(name=name, dtype=tensor["dtype"], shape=shape, data=data[begin + start : begin + end])

    # -- what changes it -----------------------------------------------------------------------------------------

    def mend(self, wanted: Iterable[Place] | None = None) -> None:
        """Digest the tiles whose writing was cut off, or the `wanted` ones, and record the digests."""
        rows = np.flatnonzero(self._states == _WRITING).tolist() if wanted is None else self._rows_of(wanted)
        if not rows:
            return
        count = min(_MENDERS, os.cpu_count() or 1, len(rows) // _FEW + 1)
        with ThreadPoolExecutor(count, "ebbtide-mend") as threads:
            for _ in threads.map(self._look, [rows[at::count] for at in range(count)]):
                pass

    def _look(self, rows: Iterable[int]) -> None:
        for row in rows:
            self._states[row] = _WRITING
            self._record(row, tile_digest(self.layout.read(self._file, *self._place(row)).data))

    def doubt(self) -> None:
        """Distrust all recorded digests until `mend`, and write the header again. Under `hold`."""
        header = np.frombuffer(self.layout.header, np.uint8)
        self._file[: len(header)] = header
        _distrust(self._memory.table)
        with suppress(OSError):
            self._memory.replace("changes", lambda _: None)

    def apply(
        self,
        task: TileTask,
        blobs: Mapping[bytes, bytes],
        changes: ElementChanges | None = None,
        *,
        checked: bool = False,
    ) -> float:
        """Make the tile of `task` of `blobs`, by digest; `checked` if these match their digests already.

        Returns the seconds that its digest took. Raises `ChunkCorrupt`, and writes nothing, if the tile does not match
        the manifest.
        """
        tensor, tile = task.place
        entry = self.layout.entries[tensor]
        if tile_size(entry, tile, self.layout.tile_bytes) != task.length:
            raise InvalidRequest("is of another geometry than the mirror", field="task")
        new, took = self._made(task, entry, blobs), 0.0
        if not (checked and task.dense == task.digest and not task.patches):
            start = time.perf_counter()
            if blake3(new.data).digest() != task.digest:
                raise ChunkCorrupt(
                    f"tile {tile} of {entry.name} is not the version's after its patches: fetch it whole"
                )
            took = time.perf_counter() - start
        row = self._first[tensor] + tile
        with self._lone(tensor):
            if changes is not None:
                old = self.layout.read(self._file, tensor, tile)
                changes.add(task.place, old, new)
            self._states[row] = _WRITING
            self.layout.write(self._file, tensor, tile, new)
            self._record(row, task.digest)
        return took

    def _record(self, row: int, digest: bytes) -> None:
        self._digests[row] = np.frombuffer(digest, np.uint8)
        self._states[row] = _KNOWN

    def _made(self, task: TileTask, entry: TensorEntry, blobs: Mapping[bytes, bytes]) -> Bytes:
        """The tile's new bytes, in a blob or in this thread's scratch."""
        if task.dense and len(blobs[task.dense]) != task.length:
            raise ChunkCorrupt(f"a tile of {entry.name} has {len(blobs[task.dense])} bytes, not {task.length}")
        dense = np.frombuffer(blobs[task.dense], np.uint8) if task.dense else None
        if dense is not None and not task.patches:
            return dense
        width = unit_width(entry.dtype)
        new = self._scratch.bytes[: task.length]
        new[:] = self.layout.read(self._file, *task.place) if dense is None else dense
        try:
            units = new.view(f"<u{width}")
            for patch in task.patches:
                self._scratch.codec(width).apply(blobs[patch], units)
        except (InvalidRequest, ValueError) as error:
            raise ChunkCorrupt(f"a patch of {entry.name} cannot be applied ({error}): fetch the tile whole") from None
        return new

    @contextmanager
    def _lone(self, tensor: int) -> Iterator[None]:
        """Lock a piece whose tiles share rows: writing one rewrites its neighbours."""
        if self.layout.together(tensor):
            yield
        else:
            with self._rows:
                yield

    def _rows_of(self, places: Iterable[Place]) -> list[int]:
        return [self._first[tensor] + tile for tensor, tile in places]

    def _place(self, row: int) -> Place:
        tensor = bisect_right(self._first, row) - 1
        return tensor, row - self._first[tensor]

    # -- what changed, for engines that change their own copy ----------------------------------------------------

    def keep_changes(self, base_root: bytes, root: bytes, changes: ElementChanges) -> bool:
        """Keep the changes between two versions for the host's other engines, in place of earlier ones. Under `hold`.

        Returns False if there is no room, or `changes` has given up."""
        if changes.given_up:
            return False
        try:
            self._memory.replace("changes", lambda file: changes.write(_descriptor(file), base_root, root))
        except OSError:
            return False
        return True

    def changes(self, base_root: bytes, root: bytes) -> Path | None:
        """Open the file of changes between two versions, if it is the one kept. Its path is valid until `close`, or
        until the next call."""
        self._close_changes()
        self._changes = found = self._memory.open("changes")
        if found is None:
            return None
        return _descriptor(found) if leads(found, base_root, root) else None

    def close(self) -> None:
        """Leave the mirror; the last process to do so removes the files. Views stay valid."""
        if not self._closed:
            self._closed = True
            self._close_changes()
            self._memory.close()

    def _close_changes(self) -> None:
        if self._changes is not None:
            os.close(self._changes)
            self._changes = None


def made(manifest: Manifest) -> bytes:
    """Digest, in 32 bytes, what two mirrors must have in common to be one: policy, geometry and the machine's boot,
    since a file on disk may have lost writes of an earlier boot."""
    text = [[entry.name, entry.dtype, entry.shape, entry.start, entry.full] for entry in manifest.tensors]
    boot = _BOOT.read_text() if _BOOT.is_file() else ""
    whole = [manifest.run_id, manifest.version.policy, manifest.tile_bytes, text, boot]
    return blake3(json.dumps(whole).encode(), derive_key_context=_CONTEXT).digest()


def _distrust(table: Buffer) -> None:
    """Mark a table's known tiles for another check."""
    states = np.frombuffer(table, np.uint8)[_HEAD:]
    states = states[len(states) // (DIGEST_BYTES + 1) * DIGEST_BYTES :]
    states[states == _KNOWN] = _WRITING


def _write(file: int, data: bytes) -> None:
    with open(file, "wb", closefd=False) as out:
        out.write(data)


def _descriptor(file: int) -> Path:
    """A path of an open file, for this user's processes on this host."""
    return Path(f"/proc/{os.getpid()}/fd/{file}")
