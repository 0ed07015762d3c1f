"""One page of shared memory: what an engine may do in its next step, and what it did in its last.

Invariant: three parts with one writer each. The guard writes the *budget* (under a sequence number that is odd while it
writes, so that nobody reads half of one), the worker the *lease*, which it renews with each grant, and the engine the
*steps*. All times are nanoseconds of CLOCK_MONOTONIC, which all processes of a host share. A step may begin only while
the budget has tokens, and neither budget nor lease has run out: whichever of the three dies or freezes, the engine
stands still when the lease or the budget runs out, without being told. The page outlives all of them; a new engine
begins its part anew, and a writer that died in the midst of a budget leaves one that nobody can read: none.

The engine says that it steps before it looks at the budget, the guard takes the budget away before it looks whether the
engine steps: so one of the two sees the other (each with a fence between). Nobody waits for a writer.
"""

import ctypes
import mmap
import os
import stat
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from msgspec import Struct

from ebbtide.errors import InvalidRequest
from ebbtide.grants import futex
from ebbtide.types.grants import Budget

_SIZE: Final = 4096
_MAGIC: Final = 0x0001_4544_4954_4242  # "BBTIDE", then the layout's number
# Words of 64 bits. Each part has cache lines of its own.
_LAYOUT = 0
_BELL, _VERSION, _TOKENS, _SEQUENCES, _UNTIL, _IDLE = 8, 9, 10, 11, 12, 13
_LEASE, _KV_BLOCKS = 16, 17
_STEPPING, _BEGAN, _ENDED, _STEPS, _SCHEDULED, _BUSY, _RUNNING, _WAITING, _KV_USED, _KV_TOTAL, _RECOMPUTED = range(
    24, 35
)
_PID, _BLOCK_BYTES = 35, 36
#: A budget that is being written for longer than a few looks has a writer that died there: no budget.
_LOOKS: Final = 50
_NEVER: Final = 2**63 - 1
#: Times and numbers beyond this are as good as this, and fit into a word.
_MOST: Final = 1 << 62


class Stepping(Struct, frozen=True, kw_only=True):
    """The engine's part. `stepping`: a step is under way, since `began`; `ended`: when the last one did (seconds of the
    monotonic clock). Sums since the engine's start: `steps`, `scheduled` (tokens that they took), `busy_s` in which
    they ran, `recomputed` (tokens read again after a cut). `kv_used` of `kv_total` blocks, of `block_bytes` each, are
    taken. `pid` 0: no engine has begun yet."""

    stepping: bool
    began: float
    ended: float
    steps: int
    scheduled: int
    busy_s: float
    running: int
    waiting: int
    kv_used: int
    kv_total: int
    recomputed: int
    pid: int
    block_bytes: int = 0


class Page:
    """The mapped page. Each method belongs to one of guard, worker and engine, as said there."""

    def __init__(self, path: Path, *, create: bool = False) -> None:
        """Map the page at `path`; with `create`, make it if it is not there.

        Raises `InvalidRequest` for a file that is no page, or not this user's own.
        """
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_CREAT if create else 0)
        try:
            descriptor = os.open(path, flags, 0o600)
        except OSError as error:
            raise InvalidRequest(f"cannot be opened: {error.strerror}", field=str(path)) from None
        try:
            self._file = _identity(os.fstat(descriptor))
            self._memory = _mapped(descriptor, path, create=create)
        finally:
            os.close(descriptor)
        self._lock = threading.Lock()
        self._words = memoryview(self._memory).cast("q")
        self._halves = memoryview(self._memory).cast("I")
        self._bell = ctypes.addressof(ctypes.c_char.from_buffer(self._memory)) + 8 * _BELL
        if create and self._words[_LAYOUT] == 0:
            self._words[_LAYOUT] = _MAGIC
        if self._words[_LAYOUT] != _MAGIC:
            raise InvalidRequest("is no page of grants, or of another version", field=str(path))

    # The guard's.

    def write_budget(self, budget: Budget, *, idle: bool = False) -> None:
        """Say what the next step may take, and wake the engine if it waits. `idle`: nothing is inside the serving
        engine."""
        words = self._words
        version = words[_VERSION] | 1
        words[_VERSION] = version
        words[_TOKENS], words[_SEQUENCES] = _word(budget.tokens), _word(budget.sequences)
        words[_UNTIL], words[_IDLE] = _word(budget.until * 1e9), int(idle)
        words[_VERSION] = version + 1
        self._fence()
        if budget.tokens:
            self.ring()

    def steps(self) -> Stepping:
        """What the engine says of itself."""
        words = self._words
        return Stepping(
            stepping=bool(words[_STEPPING]),
            began=words[_BEGAN] / 1e9,
            ended=words[_ENDED] / 1e9,
            steps=words[_STEPS],
            scheduled=words[_SCHEDULED],
            busy_s=words[_BUSY] / 1e9,
            running=words[_RUNNING],
            waiting=words[_WAITING],
            kv_used=words[_KV_USED],
            kv_total=words[_KV_TOTAL],
            recomputed=words[_RECOMPUTED],
            pid=words[_PID],
            block_bytes=words[_BLOCK_BYTES],
        )

    # The worker's.

    def renew(self, until: float) -> None:
        """Hold a grant until `until` (seconds, monotonic); 0 gives it back."""
        held = self._words[_LEASE] > time.monotonic_ns()
        self._words[_LEASE] = _word(until * 1e9)
        if not held:
            self.ring()

    def limit_kv(self, blocks: int) -> None:
        """How many blocks of keys and values the engine may use; below 0: all."""
        self._words[_KV_BLOCKS] = _word(blocks)
        self.ring()

    def ring(self) -> None:
        """Wake the engine if it waits."""
        self._halves[2 * _BELL] = (self._halves[2 * _BELL] + 1) & 0xFFFF_FFFF
        futex.wake(self._bell)

    # The engine's.

    @property
    def kv_blocks(self) -> int:
        return self._words[_KV_BLOCKS]

    def budget(self) -> Budget:
        """What a step that begins now may take; nothing if budget or lease have run out."""
        return self._read(self._words[_LEASE])

    def offered(self) -> Budget:
        """The guard's budget alone, whoever holds a lease."""
        return self._read(_NEVER)

    def idle(self) -> bool:
        """Whether the guard says that nothing is inside the serving engine, in a budget that holds, whoever holds a
        lease: for what else runs in its idle time."""
        return self._read(_NEVER, idle=True).tokens > 0

    def _read(self, lease: int, *, idle: bool = False) -> Budget:
        words, now = self._words, time.monotonic_ns()
        for _ in range(_LOOKS):
            version = words[_VERSION]
            tokens, sequences, until = words[_TOKENS], words[_SEQUENCES], words[_UNTIL]
            fit = not idle or words[_IDLE] == 1
            if version == words[_VERSION] and not version & 1:
                break
        else:
            return Budget()
        until = min(until, lease)
        return (
            Budget(tokens, sequences, until / 1e9) if fit and min(tokens, sequences) > 0 and until > now else Budget()
        )

    def await_budget(self, timeout_s: float, *, kv_blocks: int | None = None) -> Budget:
        """The budget, as soon as there is one, or an empty one after `timeout_s`, or once no longer `kv_blocks` may be
        used. Uses no processor meanwhile."""
        end = time.monotonic() + timeout_s
        while True:
            seen = self._halves[2 * _BELL]
            budget = self.budget()
            left = end - time.monotonic()
            if budget.tokens or left <= 0 or kv_blocks not in {None, self.kv_blocks}:
                return budget
            futex.wait(self._bell, seen, left)

    def await_ring(self, timeout_s: float) -> None:
        """Return with the next news for the engine, or after `timeout_s`."""
        futex.wait(self._bell, self._halves[2 * _BELL], timeout_s)

    def enter(self, pid: int, kv_total: int, block_bytes: int = 0) -> None:
        """A new engine begins its part anew."""
        for word in range(_STEPPING, _BLOCK_BYTES + 1):
            self._words[word] = 0
        self._words[_KV_BLOCKS] = -1
        self._words[_KV_TOTAL], self._words[_BLOCK_BYTES], self._words[_PID] = kv_total, block_bytes, pid

    def begin_step(self, *, heeding: bool = True) -> Budget:
        """Say that a step begins, and take the budget that then still holds. Without one, nothing has begun, unless
        the engine is `heeding` none."""
        words = self._words
        if heeding and not self.budget().tokens:
            return Budget()
        last, words[_BEGAN] = words[_BEGAN], time.monotonic_ns()
        words[_STEPPING] = 1
        self._fence()
        budget = self.budget()
        if heeding and not budget.tokens:
            words[_STEPPING], words[_BEGAN] = 0, last
        return budget

    def end_step(self, scheduled: int) -> None:
        """The step that began took `scheduled` tokens; none: it was no step."""
        words, now = self._words, time.monotonic_ns()
        if scheduled:
            words[_ENDED] = now
            words[_SCHEDULED] += scheduled
            words[_BUSY] += now - words[_BEGAN]
            words[_STEPS] += 1  # the last: who has counted it finds the sums
        words[_STEPPING] = 0

    def report(self, *, running: int, waiting: int, kv_used: int, recomputed: int) -> None:
        words = self._words
        words[_RUNNING], words[_WAITING], words[_KV_USED], words[_RECOMPUTED] = running, waiting, kv_used, recomputed

    def _fence(self) -> None:
        """Have all that was written before be seen by others before anything is read behind this.

        The atomic operation of a lock is such a barrier on x86. On processors with weaker ones a step that begins in
        the very instant of a reclaim may be overlooked by the guard: it is over before long, and the next one does not
        begin.
        """
        with self._lock:
            pass

    def remove(self, path: Path) -> None:
        """Remove the file at `path` if it is this page still."""
        with suppress(OSError):
            if _identity(path.lstat()) == self._file:
                path.unlink()

    def close(self) -> None:
        """Unmap. Nothing else may be called behind it."""
        self._words.release()
        self._halves.release()


def _word(value: float) -> int:
    """As it fits into a word; what is no number is 0."""
    return int(min(max(value, -_MOST), _MOST)) if value == value else 0  # noqa: PLR0124 - NaN is not itself


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _mapped(descriptor: int, path: Path, *, create: bool) -> mmap.mmap:
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
        raise InvalidRequest("is no file of this user's own", field=str(path))
    if create and status.st_size == 0:
        try:
            os.posix_fallocate(descriptor, 0, _SIZE)  # a page without room for it would end its writers by a SIGBUS
        except OSError as error:
            raise InvalidRequest(f"cannot be made: {error.strerror}", field=str(path)) from None
    elif status.st_size != _SIZE:
        raise InvalidRequest("is no page of grants", field=str(path))
    return mmap.mmap(descriptor, _SIZE)
