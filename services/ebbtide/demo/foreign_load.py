"""What programs that are not ours took of the cores: a measurement beside them tells of them too."""

import os
import resource
import time
from collections.abc import Mapping
from typing import Final

import psutil
from msgspec import Struct

_NOT_BUSY: Final = frozenset({"idle", "iowait", "guest", "guest_nice"})


class CoreUse(Struct, frozen=True):
    """Core-seconds up to `at_s`: of all programs, and of this process and those below it."""

    at_s: float
    all_s: float
    own_s: float


def cores() -> CoreUse:
    """As they stand now."""
    return CoreUse(time.monotonic(), busy_s(psutil.cpu_times()._asdict()), _own_s())


def busy_s(times: Mapping[str, float]) -> float:
    """Core-seconds, by what they went into, that were not idle: niced programs', interrupts' and other machines' too.
    What guests took stands in `user` and `nice` as well."""
    return sum(seconds for name, seconds in times.items() if name not in _NOT_BUSY)


def share_of_others(begin: CoreUse, end: CoreUse) -> float:
    """Of all cores between the two looks, what others took; 0 to 1. A program below this one that ended unseen by it
    counts among them."""
    theirs = (end.all_s - begin.all_s) - (end.own_s - begin.own_s)
    there = (end.at_s - begin.at_s) * (os.cpu_count() or 1)
    return min(1.0, max(0.0, theirs / there)) if there > 0 else 0.0


def _own_s() -> float:
    """Of those that live, and of those that ended and were waited for."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    total = ended.ru_utime + ended.ru_stime
    me = psutil.Process()
    for one in (me, *me.children(recursive=True)):
        try:
            times = one.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system
        if one.pid != me.pid:  # its own that ended and were waited for; ours are in `ended`
            total += times.children_user + times.children_system
    return total
