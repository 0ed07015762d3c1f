"""Provides a mirror's memory: private to this process, or in files that this user's processes share.

Invariant: `weights` is a file of `size` bytes. A shared one has memory reserved for each byte, so that no write to its
mapping can fail. `table` is all zeros when the weights were laid out again; it is distrusted before any process sees it
when they had no user. The header is right when a process has joined. Small files are replaced whole.
"""

import fcntl
import mmap
import os
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Final, Protocol, TypeAlias

from ebbtide.errors import NoCapacity
from ebbtide.transfer.mirror.shared_folder import UNCHECKED, SharedFolder, refused, reserve

Buffer: TypeAlias = bytearray | mmap.mmap
#: Writes a file's whole content to a descriptor.
Writer: TypeAlias = Callable[[int], None]
#: Marks all entries of a table as not known.
Distrust: TypeAlias = Callable[[Buffer], None]
#: The most bytes read of a small file.
_SMALL: Final = 1 << 16


class MirrorMemory(Protocol):
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
