"""Counts each attempt's generated tokens in a mapped file (the ledger) that survives the worker's SIGKILL.

Format, in the machine's byte order: a header of 64 bytes (`EBBLEDG1`, u32 record size, u32 index after the newest
record, 0 if not known, the rest zero), then records of 400 bytes:

    0  u32 state: 0 unused, 1 complete     4  u32 start: stored tokens that the attempt began with
    8  u32 generated: tokens since         12 3 x (u8 length, 128 bytes): run_id, rollout_id, attempt_id; the rest zero

Invariant: a record's state is written last and `generated` grows by aligned four-byte writes, so a reader finds each
record whole or not at all, also after the writer's death. One process writes a file, and appends to its records. Pages
of a shared mapping belong to the kernel: they outlive the process, but not the machine. The file has at most
`MOST_RECORDS`, unless more attempts run at once: a new one then takes the place of the oldest that has ended.
"""

import mmap
import os
import struct
from pathlib import Path
from typing import BinaryIO, Final, Self

from msgspec import Struct

from ebbtide.errors import InvalidRequest
from ebbtide.types.fleet import AttemptRef

_MAGIC: Final = b"EBBLEDG1"
_HEADER_BYTES: Final = 64
_RECORD_BYTES: Final = 400
_RECORD: Final = struct.Struct("=III129s129s129s")
_COUNT: Final = struct.Struct("I")  # native: one machine store, which a SIGKILL cannot split
_NEXT: Final = 12  # where the header has the index after the newest record
_GROW: Final = 1024  # records; 400 KiB
#: Records kept, 25 MiB: those of the last hours, at several attempts a second.
MOST_RECORDS: Final = 1 << 16


class AttemptRecord(Struct, frozen=True):
    """One attempt's tokens."""

    run_id: str
    rollout_id: str
    attempt_id: str
    start: int  # tokens that were stored before the attempt
    generated: int  # tokens that left its engine


class Ledger:
    """Writes a ledger: `entry = ledger.open(...)`, `ledger.add(entry, n)` as tokens come, then `ledger.end(entry)`."""

    def __init__(self, path: Path) -> None:
        """Create or reopen the file at `path`. Raises `InvalidRequest` if it is another file, or cannot be opened."""
        try:
            size = path.stat().st_size if path.exists() else 0
            if size == 0:
                path.write_bytes((_MAGIC + _COUNT.pack(_RECORD_BYTES)).ljust(_HEADER_BYTES, b"\0"))
            with path.open("rb") as file:
                _check_header(file.read(_HEADER_BYTES), path)
            self._file = path.open("r+b")
        except OSError as error:
            raise InvalidRequest(f"{path}: {error.strerror}", field="counter_file") from None
        records = -(-max(0, size - _HEADER_BYTES) // _RECORD_BYTES)
        self._most, self._map = max(MOST_RECORDS, records), self._mapped(max(_GROW, records))
        self._next: int = _COUNT.unpack_from(self._map, _NEXT)[0] or self._first_unused()
        self._open: set[int] = set()  # entries of running attempts

    def open(self, attempt: AttemptRef, start: int) -> int:
        """Begin the record of an attempt. Returns its entry."""
        ids = [_text(value) for value in (attempt.run_id, attempt.rollout_id, attempt.attempt_id)]
        offset = self._claim()
        self._map[offset : offset + _RECORD.size] = _RECORD.pack(0, start, 0, *ids)
        _COUNT.pack_into(self._map, offset, 1)
        self._open.add(offset)
        return offset

    def end(self, entry: int) -> None:
        """The attempt has ended: its record is kept, until it is the oldest and its place is needed."""
        self._open.discard(entry)

    def _claim(self) -> int:
        """Find the place of a new record, and note that the record is the newest. Returns its offset."""
        if len(self._open) == self._most:
            self._next, self._most = self._most, self._most + 1
        while (offset := _HEADER_BYTES + self._next % self._most * _RECORD_BYTES) in self._open:
            self._next += 1
        self._next = self._next % self._most + 1
        if offset + _RECORD_BYTES > len(self._map):
            self._map.close()
            self._map = self._mapped(self._next - 1 + _GROW)
        _COUNT.pack_into(self._map, offset, 0)  # no longer the former record, and not yet the new one
        _COUNT.pack_into(self._map, _NEXT, self._next)
        return offset

    def add(self, entry: int, tokens: int) -> None:
        """Count new tokens as soon as they come."""
        (before,) = _COUNT.unpack_from(self._map, entry + 8)
        _COUNT.pack_into(self._map, entry + 8, before + tokens)

    def close(self) -> None:
        self._map.close()
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _first_unused(self) -> int:
        record, mapped = 0, (len(self._map) - _HEADER_BYTES) // _RECORD_BYTES
        while record < mapped and _COUNT.unpack_from(self._map, _HEADER_BYTES + record * _RECORD_BYTES)[0]:
            record += 1
        return record

    def _mapped(self, records: int) -> mmap.mmap:
        """Map the file with room for so many records."""
        size = _HEADER_BYTES + records * _RECORD_BYTES
        self._file.truncate(size)
        return mmap.mmap(self._file.fileno(), size)


def read_ledger(path: Path, *, newest: int = 0) -> list[AttemptRecord]:
    """All whole records, oldest first, or up to `newest` of the newest; a torn one is left out.

    Raises `InvalidRequest`.
    """
    with path.open("rb") as file:
        header = file.read(_HEADER_BYTES)
        _check_header(header, path)
        (end,) = _COUNT.unpack_from(header, _NEXT)
        places = (os.fstat(file.fileno()).st_size - _HEADER_BYTES) // _RECORD_BYTES
        before = newest - end if newest and end else places  # how many to read behind the newest one: the oldest
        data = _read(file, max(end, places - before), places)
        data += _read(file, max(0, end - newest) if newest else 0, end)
    records = []
    for offset in range(0, len(data) - _RECORD.size + 1, _RECORD_BYTES):
        state, start, generated, *ids = _RECORD.unpack_from(data, offset)
        if state == 1:
            run_id, rollout_id, attempt_id = (raw[1 : 1 + raw[0]].decode() for raw in ids)
            records.append(AttemptRecord(run_id, rollout_id, attempt_id, start, generated))
    return records


def _read(file: BinaryIO, first: int, end: int) -> bytes:
    """The bytes of the records [first, end), as far as the file goes."""
    file.seek(_HEADER_BYTES + first * _RECORD_BYTES)
    return file.read(max(0, end - first) * _RECORD_BYTES)


def _text(value: str) -> bytes:
    encoded = value.encode()
    if len(encoded) > 128:
        raise InvalidRequest("an id has at most 128 characters", field="attempt")
    return bytes([len(encoded)]) + encoded


def _check_header(header: bytes, path: Path) -> None:
    if header[: len(_MAGIC)] != _MAGIC or _COUNT.unpack_from(header.ljust(12, b"\0"), 8)[0] != _RECORD_BYTES:
        raise InvalidRequest(
            f"{path} is no ledger of this version; name another file, or remove it", field="counter_file"
        )
