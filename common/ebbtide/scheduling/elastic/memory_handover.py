"""Decides whether a trainer moves optimiser, gradients and reference network off its device while that is lent.

Moving costs the time of two copies over the bus, so it is done only if an engine lacks the memory to come back. If the
host has no room either, everything stays, and the engine waits: rollouts go on elsewhere, if anybody else is there.
"""

from typing import Final

from msgspec import Struct

#: Share of a device's memory that stays free beside the engine: its steps allocate beyond what it keeps.
_RESERVE: Final = 0.03
#: Share of the host's memory that stays free: mirrors of weights and checkpoints being written lie there.
_HOST_RESERVE: Final = 0.1


class HandoverMemory(Struct, frozen=True, kw_only=True):
    """Memory in bytes, measured once the trainer's caches are empty."""

    free: int  # on the device
    total: int
    movable: int  # that the trainer can move to the host
    host_free: int
    host_total: int
    needed: int  # by an engine, to come back; 0: none needs any, or it is unknown


def moves_to_host(memory: HandoverMemory) -> bool:
    """Whether the movable memory leaves the device."""
    short = memory.needed + _RESERVE * memory.total > memory.free
    fits = memory.host_free - memory.movable >= _HOST_RESERVE * memory.host_total
    return memory.needed > 0 and short and memory.movable > 0 and fits


def lacking(free: int, total: int, needed: int) -> int:
    """Bytes of the device that an engine lacks to come back."""
    return max(0, needed + int(_RESERVE * total) - free) if needed else 0
