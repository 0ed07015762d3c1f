"""Becomes another program, which the kernel kills when the parent ends: `python tied_program.py PARENT PROGRAM ...`.

A function between fork and exec would do that in the parent's copy, where gRPC's threads and handlers are half there:
such a child once hung. This file imports nothing but the standard library, to start within some milliseconds.
"""

import ctypes
import os
import signal
import sys
from typing import Final

_PR_SET_PDEATHSIG: Final = 1


def main() -> None:
    parent, program = int(sys.argv[1]), sys.argv[2:]
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() == parent:
        os.execv(program[0], program)  # noqa: S606 - the parent's own command
    os._exit(1)


if __name__ == "__main__":
    main()
