"""Remembers the newest lease of each run across lives of the guard, in the folder of grants.

Without it, a guard that has just begun would take an older trainer's wish if that one connected first, and lend a
device in whose newer trainer a step is under way.

Invariant: the file holds the leases of this boot of the host that the guard has met, whole: it is replaced, never
changed. It is written before a new lease is answered. Lost with it: only the refusal of older leases, and of
guards that are not told of the owner.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from ebbtide import telemetry
from ebbtide.scheduling.elastic.device_ownership import OwnerLease

log = telemetry.get_logger(__name__)

#: The file, in the folder of grants.
RECORD: Final = "leases.json"
_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")


class _Record(Struct, frozen=True, kw_only=True):
    boot: str = ""  # a host that was started anew has no older trainer
    leases: tuple[OwnerLease, ...] = ()


class LeaseRecord:
    """The file of one folder."""

    def __init__(self, folder: Path) -> None:
        self._path, self._boot = folder / RECORD, _BOOT.read_text().strip()
        self._written: tuple[OwnerLease, ...] = ()

    def read(self) -> tuple[OwnerLease, ...]:
        """The leases of the guard's earlier lives; none if the file is absent or damaged."""
        try:
            found = msgspec.json.decode(self._path.read_bytes(), type=_Record)
        except FileNotFoundError:
            return ()
        except (OSError, msgspec.MsgspecError) as error:
            log.warning("earlier leases cannot be read", path=str(self._path), reason=str(error))
            return ()
        self._written = found.leases if found.boot == self._boot else ()
        return self._written

    def write(self, leases: Iterable[OwnerLease]) -> None:
        """Keep these leases, unless they are there. A full disk costs the refusal of older leases after a restart."""
        if (now := tuple(leases)) == self._written:
            return
        beside = self._path.with_suffix(".new")
        try:
            beside.write_bytes(msgspec.json.encode(_Record(boot=self._boot, leases=now)))
            beside.replace(self._path)
        except OSError as error:
            log.warning("leases cannot be kept", path=str(self._path), reason=str(error))
            return
        self._written = now
