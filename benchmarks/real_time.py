"""Runs a measurement in a real-time class of the kernel, so that other programs' work does not fall into it.

A turn of a core is a few milliseconds long. A program of the usual class that wants the core, however little, delays
its begin by as much: the same engine measured half as fast beside one idle-class process. That needs a privilege
(root, or CAP_SYS_NICE); without it a measurement goes on in the usual class, and wants a quiet machine.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

#: Of all programs that are measured. The turns themselves are above them, to begin and end in time.
_MEASURED: Final = 1
_TURNS: Final = 2


@contextmanager
def real_time() -> Iterator[bool]:
    """Puts this thread, and all threads and programs that it starts, into a real-time class while the block runs.
    Gives False where that is not permitted."""
    former, parameters = os.sched_getscheduler(0), os.sched_getparam(0)
    permitted = _enter(_MEASURED)
    try:
        yield permitted
    finally:
        if permitted:
            os.sched_setscheduler(0, former, parameters)


def above_the_measured() -> None:
    """Has this thread go before all programs that are measured, if it is in their class."""
    if os.sched_getscheduler(0) == os.SCHED_RR:
        _enter(_TURNS)


def measure(thread: int) -> None:
    """Puts a thread that was started above the measured ones among them, if it is in their class."""
    if os.sched_getscheduler(thread) == os.SCHED_RR:
        os.sched_setscheduler(thread, os.SCHED_RR, os.sched_param(_MEASURED))


def _enter(priority: int) -> bool:
    try:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(priority))
    except PermissionError:
        return False
    return True
