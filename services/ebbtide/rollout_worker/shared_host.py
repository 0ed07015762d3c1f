"""Names the folder in shared memory that the workers of one host use, and the host that they share it on."""

import hashlib
import os
from pathlib import Path
from typing import Final

from ebbtide.errors import InvalidRequest

_SHARED_MEMORY: Final = Path("/dev/shm")  # noqa: S108 - the folder below it is this user's alone, or refused
_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")


def shared_folder() -> str:
    """A folder for each user in shared memory; empty where there is none."""
    return str(_SHARED_MEMORY / f"ebbtide-{os.geteuid()}") if _SHARED_MEMORY.is_dir() else ""


def host_name(folder: Path) -> str:
    """The same for all processes, and only those, that find the same files in `folder`, which this makes (0700).

    Containers of one machine with shared memory of their own are hosts of their own. Raises `InvalidRequest`.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        boot, found = _BOOT.read_text() if _BOOT.is_file() else "", folder.parent.stat()
    except OSError as error:
        raise InvalidRequest(f"{folder} cannot be made ({error.strerror}); name another", field="mirror_dir") from None
    text = f"{boot} {found.st_dev} {found.st_ino} {folder.name}"
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
