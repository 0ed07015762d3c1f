"""Writes and reads the file of recorded decisions: a head and records, each behind its length in 4 bytes (big-endian).

All are MessagePack of `msgspec` structs: JSON has no infinity. The file has names of runs, rollouts and workers, and
runs' specs, but no prompts and no tokens.

Invariant: the file never has more than `most_bytes`: it ends there, and the coordinator goes on without it. If the
process is killed, what it buffered is lost: at most the records of the last 0.5 s before the last one. An
incomplete last record is left then, which readers pass over.
"""

import math
import os
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO, Final, TypeVar

import msgspec
from msgspec import Struct

from ebbtide import telemetry
from ebbtide.errors import InvalidRequest

log = telemetry.get_logger(__name__)
T = TypeVar("T")
#: Grows when the meaning of records changes.
FORMAT: Final = 5
#: A record of the largest run, whose queue is read again, has some 20 MB.
_MOST_RECORD_BYTES: Final = 64 << 20
_BUFFER_BYTES: Final = 64 << 10
#: What is buffered is written so often, while there is something to record.
_FLUSH_S: Final = 0.5
_encoder: Final = msgspec.msgpack.Encoder()


class LogHead(Struct, frozen=True):
    """Heads of all formats have the first two fields."""

    format: int
    release: str  # that wrote it
    #: As the settings have them.
    timeslice_s: float = 0.0
    rebalance: bool = True
    interactive_slots: int = 0


class CallRecord(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """An outermost call of a method of the state, or of a round."""

    at: float  # seconds on the coordinator's clock when it was over
    method: str
    owner: str | int  # whose method: a run's or a session's id, an attempt's serial number
    given: Any  # its arguments by name: a struct when written, a map when read
    readings: tuple[float, ...] = ()  # of the clock, in the call
    #: Placements, what workers were told, or what ends runs and rollouts: (method or kind, owner, arguments).
    decided: list[Any] = []


def packed(one: LogHead | CallRecord) -> bytes:
    data = _encoder.encode(one)
    return len(data).to_bytes(4, "big") + data


class DecisionLog:
    def __init__(self, path: Path, head: LogHead, *, most_bytes: int) -> None:
        """Begin a file that its owner alone can read; a former one of this name becomes `PATH.former`. Raises
        `InvalidRequest` if it cannot be written.
        """
        self._path, self._left = path, most_bytes
        try:
            if path.exists():
                path.replace(path.with_name(f"{path.name}.former"))
            opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except OSError as error:
            text = f"{path} cannot be written ({error.strerror}); name a file where the coordinator may write"
            raise InvalidRequest(text, field="record_decisions") from None
        self._file: BinaryIO | None = os.fdopen(opened, "wb", buffering=_BUFFER_BYTES)
        self._flushed = -math.inf
        self._put(packed(head), 0.0)

    def write(self, record: CallRecord) -> None:
        if self._file is not None:
            self._put(packed(record), record.at)

    def _put(self, data: bytes, now: float) -> None:
        if self._file is None:
            return
        self._left -= len(data)
        try:
            if self._left >= 0:
                self._file.write(data)
                if now - self._flushed >= _FLUSH_S:
                    self._flushed = now
                    self._file.flush()
                return
            log.warning("decisions no longer recorded: the file is full", path=str(self._path))
        except OSError as error:
            log.warning("decisions no longer recorded", path=str(self._path), reason=str(error))
        self.close()

    def close(self) -> None:
        """Write what is buffered. A repeat does nothing."""
        file, self._file = self._file, None
        if file is not None:
            try:
                file.close()
            except OSError as error:
                log.warning("last decisions not recorded", path=str(self._path), reason=str(error))


def read_log(path: Path, begin: Callable[[LogHead], None] = lambda _: None) -> Iterator[tuple[int, CallRecord]]:
    """The records of a file with their numbers, from 1 on; `begin` gets its head before. Raises `InvalidRequest` with
    the file and the number of what is no record (0: the head), or for another format.
    """
    frames = _frames(path)
    head = _decoded(path, 0, next(frames, b""), msgspec.msgpack.Decoder(LogHead))
    if head.format != FORMAT:
        raise InvalidRequest(
            f"{path}: has format {head.format} of release {head.release}; this release reads format {FORMAT}: "
            "replay it with a release that wrote it"
        )
    begin(head)
    decoder = msgspec.msgpack.Decoder(CallRecord)
    for number, data in enumerate(frames, 1):
        yield number, _decoded(path, number, data, decoder)


def _decoded(path: Path, number: int, data: bytes, decoder: msgspec.msgpack.Decoder[T]) -> T:
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"{path}: record {number} is damaged, or no file of record_decisions ({error})") from None


def _frames(path: Path) -> Iterator[bytes]:
    """The bytes of each record, but for an incomplete last one."""
    try:
        file = path.open("rb")
    except OSError as error:
        text = f"{path}: cannot be read ({error.strerror}); name a file that record_decisions wrote"
        raise InvalidRequest(text) from None
    with file:
        for number in count():
            size = int.from_bytes(head := file.read(4), "big")
            if len(head) < 4:
                return
            if size > _MOST_RECORD_BYTES:
                raise InvalidRequest(
                    f"{path}: record {number} would have {size} bytes, more than the {_MOST_RECORD_BYTES} of any: "
                    "it is damaged, or no file of record_decisions"
                )
            data = file.read(size)
            if len(data) < size:
                return
            yield data
