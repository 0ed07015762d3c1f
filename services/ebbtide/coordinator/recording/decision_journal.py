"""Writes what decisions were handed, and what was decided, into a file.

Invariant: a record is written when its call is over, so the records stand in the order in which the model changed. The
file never has more than `most_bytes`: it ends there, and the coordinator goes on without it. If the process is killed,
what it buffered is lost: less than the last `_FLUSH_S` before the last record.
"""

import math
import os
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import BinaryIO, Final, cast

from ebbtide import telemetry
from ebbtide.coordinator.recording.call_recorder import CallRecorder
from ebbtide.coordinator.recording.journal_format import FORMAT, Call, JournalHead, JournalRecord, packed
from ebbtide.coordinator.recording.model_call import ModelCall
from ebbtide.errors import InvalidRequest

log = telemetry.get_logger(__name__)
_BUFFER_BYTES: Final = 64 << 10
#: What is buffered is written so often, while there is something to record.
_FLUSH_S: Final = 0.5


class DecisionJournal(CallRecorder):
    def __init__(self, path: Path, *, most_bytes: int, clock: Callable[[], float] | None = None) -> None:
        """Begin a file that its owner alone can read; a former one of this name becomes `PATH.former`. Raises
        `InvalidRequest` if it cannot be written.
        """
        super().__init__(clock or time.monotonic)
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
        self._put(packed(JournalHead(FORMAT, version("ebbtide"))), self._read_clock())

    def write(self, call: ModelCall, readings: list[float]) -> None:
        if self._file is not None:
            now = self._read_clock()
            self._put(packed(JournalRecord(now, cast("Call", call), tuple(readings))), now)

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
