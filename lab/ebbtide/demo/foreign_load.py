"""Measures the share of the cores that foreign programs took, as they disturb measurements beside them."""

import os
import resource
import time
from collections.abc import Mapping
from typing import Final

import psutil
from msgspec import Struct

_NOT_BUSY: Final = frozenset({"idle", "iowait", "guest", "guest_nice"})


class CoreUse(Struct, frozen=True):
    """Core-seconds up to `at_s`."""

    at_s: float
    all_s: float  # of all programs
    own_s: float  # of this process and those below it


def cores() -> CoreUse:
    return CoreUse(time.monotonic(), busy_s(psutil.cpu_times()._asdict()), _own_s())


def busy_s(times: Mapping[str, float]) -> float:
    """Sums up the core-seconds that were not idle; `user` and `nice` include those of guests."""
    return sum(seconds for name, seconds in times.items() if name not in _NOT_BUSY)


def share_of_others(begin: CoreUse, end: CoreUse) -> float:
    """Share of all cores (0 to 1) that others took between two looks; it includes own programs that ended unseen."""
    theirs = (end.all_s - begin.all_s) - (end.own_s - begin.own_s)
    there = (end.at_s - begin.at_s) * (os.cpu_count() or 1)
    return min(1.0, max(0.0, theirs / there)) if there > 0 else 0.0


def _own_s() -> float:
    """Sums up live programs and those that ended and were waited for."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    total = ended.ru_utime + ended.ru_stime
    me = psutil.Process()
    for one in (me, *me.children(recursive=True)):
        try:
            times = one.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system
        if one.pid != me.pid:  # `ended` has those of this process
            total += times.children_user + times.children_system
    return total
