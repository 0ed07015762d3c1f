"""Builds a root directory of its own for environment code: Python, libraries, named folders, all of it read-only.

Nothing else of the host is there: no home, no state of services, no socket, no `/sys`. Files with secrets that lie in a
folder which is there are covered. `/tmp` and `/dev/shm` are new, in memory and bounded.
"""

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from ebbtide.driver.isolation import linux_calls as linux

#: Exists everywhere, and nothing under it is wanted: the new root is mounted on it until it becomes the root.
_PLACE: Final = "/sys"
_SYSTEM: Final = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
#: Of /etc only what libraries read, as services keep settings and keys there.
_ETC: Final = (
    "alternatives", "ca-certificates", "crypto-policies", "group", "host.conf", "hosts", "ld.so.cache", "ld.so.conf",
    "ld.so.conf.d", "localtime", "mime.types", "nsswitch.conf", "os-release", "passwd",
    "pki/ca-trust/extracted", "pki/tls/certs", "protocols", "resolv.conf", "services", "ssl/certs", "ssl/openssl.cnf",
)  # fmt: skip
_DEVICES: Final = ("null", "zero", "full", "random", "urandom")
#: Files that environment code writes to /tmp and /dev/shm are memory, too.
_WRITABLE: Final = "mode=755,size=256m,nr_inodes=65536"


def enter_private_root(readable: Sequence[str], secrets: Sequence[str]) -> None:
    """Builds the root and enters it. Needs new mount and PID namespaces, and must run in the latter.

    Raises `OSError` where the host does not allow a mount.
    """
    linux.mount("none", "/", "", linux.MS_REC | linux.MS_PRIVATE)
    linux.mount("tmpfs", _PLACE, "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, _WRITABLE)
    for name in ("dev", "dev/shm", "proc", "tmp"):
        Path(_PLACE, name).mkdir()
    for name in ("dev/shm", "tmp"):
        Path(_PLACE, name).chmod(0o1777)
    for path in (*_SYSTEM, *(f"/etc/{name}" for name in _ETC)):
        _show(path)
    for path in sorted({*readable, *map(os.path.realpath, readable)}):  # a folder before what lies in it
        _show(path)
    _devices()
    for secret in secrets:
        _cover(secret)
    with contextlib.suppress(OSError):  # refused where parts of the present one are covered, as in containers
        linux.mount("proc", f"{_PLACE}/proc", "proc", linux.MS_NOSUID | linux.MS_NODEV | linux.MS_NOEXEC)
    linux.enter_root(_PLACE)


def _show(path: str, *, devices: bool = False) -> None:
    """Shows a file or folder of the host, at its own path."""
    target = Path(_PLACE + path)
    if os.path.lexists(target) or not Path(path).exists():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    if path in _SYSTEM and Path(path).is_symlink():
        target.symlink_to(Path(path).readlink())
        return
    if Path(path).is_dir():
        target.mkdir()
    else:
        target.touch()
    linux.mount(path, str(target), "", linux.MS_BIND | linux.MS_REC)
    linux.seal(str(target), devices=devices)


def _devices() -> None:
    for name in _DEVICES:
        _show(f"/dev/{name}", devices=True)
    for name, target in (("fd", "fd"), ("stdin", "fd/0"), ("stdout", "fd/1"), ("stderr", "fd/2")):
        Path(_PLACE, "dev", name).symlink_to(f"/proc/self/{target}")


def _cover(secret: str) -> None:
    """Covers a file that is seen, as in a folder that is shown."""
    for path in {os.path.abspath(secret), os.path.realpath(secret)}:  # noqa: PTH100 - links stay
        if Path(_PLACE + path).exists():
            linux.mount("/dev/null", _PLACE + path, "", linux.MS_BIND)
