"""Waits until another process changes a word of shared memory, by Linux's futex system call."""

import contextlib
import ctypes
import os
import platform
import time
from typing import Final

_NUMBERS: Final = {"x86_64": 202, "aarch64": 98, "ppc64le": 221, "s390x": 238, "riscv64": 98}
_WAIT, _WAKE = 0, 1
_ALL: Final = 2**31 - 1
#: If the system call's number is unknown, waiting polls at this interval.
_POLL_S: Final = 0.001
_number = _NUMBERS.get(platform.machine(), 0) if os.name == "posix" else 0
_libc = ctypes.CDLL(None, use_errno=True)


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def wait(address: int, seen: int, timeout_s: float) -> None:
    """Return once the 32-bit word at `address` is no longer `seen`, after a `wake`, or after `timeout_s`.

    It may return early: check the condition again.
    """
    if not _number:
        time.sleep(min(_POLL_S, max(0.0, timeout_s)))
        return
    seconds = max(0.0, timeout_s)
    limit = _Timespec(int(seconds), int(seconds % 1 * 1e9))
    _libc.syscall(_number, ctypes.c_void_p(address), _WAIT, ctypes.c_uint(seen), ctypes.byref(limit), None, 0)


def wake(address: int) -> None:
    """Wake all processes that wait on the word at `address`."""
    if _number:
        with contextlib.suppress(OSError):
            _libc.syscall(_number, ctypes.c_void_p(address), _WAKE, _ALL, None, None, 0)
