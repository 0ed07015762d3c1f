"""Where a mirror's bytes lie: in memory of this process alone, or in files that the processes of this user share.

Invariant: `weights` is a file of `size` bytes and, where it is shared, has memory of its own for each of them, so that
no write to its mapping can fail; `table` is of zeros when the weights were laid out anew. Small files change whole.
"""

import fcntl
import mmap
import os
from pathlib import Path
from typing import Protocol, TypeAlias

from ebbtide.transfer.shared import SharedFolder, reserve

Buffer: TypeAlias = bytearray | mmap.mmap


class Memory(Protocol):
    weights: int  # a descriptor of the file
    table: Buffer

    def read(self, name: str) -> bytes:
        """A small file whole; nothing if it is not there."""
        ...

    def replace(self, name: str, data: bytes) -> None:
        """Make `data` all of a small file, at once or not at all."""
        ...

    def begin(self, name: str) -> int:
        """A descriptor of a new, empty file, that `end` will put in place of the old."""
        ...

    def end(self, name: str, file: int) -> None: ...

    def open(self, name: str) -> int | None:
        """A descriptor of a file, to be closed by the caller; None if it is not there."""
        ...

    def close(self) -> None: ...


class PrivateMemory:
    """Memory that ends with the process. It comes as it is written, so parts that are not cost nothing."""

    def __init__(self, size: int, table: int, header: bytes) -> None:
        self.table: Buffer = bytearray(table)
        self._small: dict[str, bytes] = {}
        self._files: dict[str, int] = {}
        self.weights = os.memfd_create("ebbtide-weights")
        os.ftruncate(self.weights, size)
        os.pwrite(self.weights, header, 0)

    def read(self, name: str) -> bytes:
        return self._small.get(name, b"")

    def replace(self, name: str, data: bytes) -> None:
        self._small[name] = data

    def begin(self, name: str) -> int:
        return os.memfd_create(f"ebbtide-{name}")

    def end(self, name: str, file: int) -> None:
        if (old := self._files.pop(name, None)) is not None:
            os.close(old)
        self._files[name] = file

    def open(self, name: str) -> int | None:
        return os.dup(self._files[name]) if name in self._files else None

    def close(self) -> None:
        for file in (self.weights, *self._files.values()):
            os.close(file)


class SharedMemory:
    """Files below `folder` for the mirrors that are `made` alike (32 bytes); see `shared`."""

    def __init__(self, folder: Path, made: bytes, size: int, table: int, header: bytes) -> None:
        """Raises `InvalidRequest` for a folder that is not this user's alone, `NoCapacity` if it has no room."""
        self._folder = SharedFolder(folder, made)
        self.weights = self._folder.open("weights")
        digests = self._folder.open("digests")
        try:
            fcntl.flock(digests, fcntl.LOCK_EX)  # for as long as it takes to lay out
            sizes = os.fstat(digests).st_size, os.fstat(self.weights).st_size
            if sizes != (table, size) or os.pread(digests, len(made), 0) != made:
                os.ftruncate(digests, 0)
                reserve(digests, table, str(folder))
                reserve(self.weights, size, str(folder))
                os.pwrite(self.weights, header, 0)
                os.pwrite(digests, made, 0)  # last: who is killed before has it done again
            self.table: Buffer = mmap.mmap(digests, table)
        except BaseException:
            self.close()
            raise
        finally:
            fcntl.flock(digests, fcntl.LOCK_UN)  # the mapping keeps a copy of the descriptor
            os.close(digests)

    def read(self, name: str) -> bytes:
        if (file := self._folder.find(name)) is None:
            return b""
        with os.fdopen(file, "rb") as whole:
            return whole.read(1 << 16)

    def replace(self, name: str, data: bytes) -> None:
        file = self.begin(name)
        os.write(file, data)
        self.end(name, file)
        os.close(file)

    def begin(self, name: str) -> int:
        file = self._folder.open(f"{name}.new")
        os.ftruncate(file, 0)
        return file

    def end(self, name: str, file: int) -> None:  # noqa: ARG002 - it has a name already
        self._folder.rename(f"{name}.new", name)

    def open(self, name: str) -> int | None:
        return self._folder.find(name)

    def close(self) -> None:
        os.close(self.weights)
        self._folder.leave()
