"""Returns memory to the system that requests no longer need.

Large bodies come and go in several threads. By its defaults the C library keeps a heap for each thread, and a part of
what was freed in each: under clients that sent giant bodies a gateway grew to twice its size, and stayed there.
"""

import ctypes
from typing import Final

#: From glibc's malloc.h.
_M_TRIM_THRESHOLD: Final = -1
_M_ARENA_MAX: Final = -8
#: Free bytes at the heap's end that are kept.
_KEPT: Final = 1 << 20


def return_freed_memory() -> None:
    """Has this process use one heap. Must come before threads are started; C libraries without it need nothing."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_ARENA_MAX, 1)
        # This also ends the growth of the size from which an allocation is a mapping of its own.
        libc.mallopt(_M_TRIM_THRESHOLD, _KEPT)
