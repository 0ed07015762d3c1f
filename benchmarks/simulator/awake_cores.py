"""Keeps cores from halting while something is measured on them.

A core that nothing uses halts, and takes its time to wake up, on a virtual machine above all. So steps would take
longer the less else there is to do: the same engine measured up to a fifth slower in a run than when somebody looked
at it often. A process of the kernel's idle class on each core runs only while nothing else wants the core. It calls
the kernel all the time: newer kernels take a core from a process at its next call, or else at the next tick only.
"""

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Final

from ebbtide.local_cluster.program_process import tethered

_SPIN: Final = "from os import getppid\nwhile True: getppid()"


@contextmanager
def awake_cores(cores: Sequence[int]) -> Iterator[None]:
    """Keeps these cores awake while the block runs. The processes die with this one."""
    with ExitStack() as stack:
        for core in cores:
            spinner = subprocess.Popen(
                tethered(sys.executable, "-c", _SPIN), start_new_session=True, stdin=subprocess.DEVNULL
            )
            stack.callback(spinner.wait)
            stack.callback(spinner.kill)
            os.sched_setscheduler(spinner.pid, os.SCHED_IDLE, os.sched_param(0))
            os.sched_setaffinity(spinner.pid, {core})
            # Where the kernel groups processes by session, classes hold within a group only: the group gives way, too.
            with suppress(OSError):
                Path(f"/proc/{spinner.pid}/autogroup").write_text("19")
        yield
