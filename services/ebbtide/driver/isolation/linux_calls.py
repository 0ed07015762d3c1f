"""Calls Linux where Python 3.11 has no function for it: namespaces, mounts, process control, capabilities."""

import ctypes
import os
import platform
import signal
from typing import Final

CLONE_NEWNS: Final = 0x00020000
CLONE_NEWIPC: Final = 0x08000000
CLONE_NEWUSER: Final = 0x10000000
CLONE_NEWPID: Final = 0x20000000
CLONE_NEWNET: Final = 0x40000000

MS_NOSUID: Final = 0x2
MS_NODEV: Final = 0x4
MS_NOEXEC: Final = 0x8
MS_BIND: Final = 0x1000
MS_REC: Final = 0x4000
MS_PRIVATE: Final = 0x40000
MNT_DETACH: Final = 0x2

_ATTR_RDONLY: Final = 0x1
_ATTR_NOSUID: Final = 0x2
_ATTR_NODEV: Final = 0x4
_AT_FDCWD: Final = -100
_AT_RECURSIVE: Final = 0x8000
_MOUNT_SETATTR: Final = 442  # on every architecture
_PIVOT_ROOT: Final = {"x86_64": 155, "aarch64": 41}

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36
_PR_SET_NO_NEW_PRIVS: Final = 38
_CAPABILITY_VERSION: Final = 0x20080522

_libc: Final = ctypes.CDLL(None, use_errno=True)


def unshare(flags: int) -> None:
    """Moves this process into new namespaces; of a new PID namespace, its next child is the first process."""
    _check(_libc.unshare(flags), "unshare")


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    data = options.encode() or None
    _check(_libc.mount(source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), data), f"mount {target}")


def seal(target: str, *, devices: bool = False) -> None:
    """Makes a mount and all below it read-only, without set-user-ID programs, and without devices unless asked."""
    attributes = _ATTR_RDONLY | _ATTR_NOSUID | (0 if devices else _ATTR_NODEV)
    wanted = (ctypes.c_uint64 * 4)(attributes, 0, 0, 0)
    result = _libc.syscall(
        _MOUNT_SETATTR, _AT_FDCWD, target.encode(), _AT_RECURSIVE, ctypes.byref(wanted), ctypes.c_size_t(32)
    )
    _check(result, f"mount_setattr {target}")


def enter_root(folder: str) -> None:
    """Makes the mount `folder` the root of this namespace, and lets go of the former one."""
    number = _PIVOT_ROOT.get(platform.machine())
    if number is None:
        raise OSError(0, f"pivot_root is not known on {platform.machine()}")
    os.chdir(folder)
    _check(_libc.syscall(number, b".", b"."), "pivot_root")  # the former root now lies on the new one
    _check(_libc.umount2(b".", MNT_DETACH), "umount2")
    os.chdir("/")


def adopt_orphans() -> None:
    """Makes this process the parent of descendants whose own parent has died."""
    _check(_libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), "prctl")


def die_with_parent() -> None:
    """Has the kernel kill this process when its parent dies. A change of user or program revokes it."""
    _check(_libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl")


def give_up_privileges() -> None:
    """Drops all capabilities, and forbids gaining any by running programs."""
    _check(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl")
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
    none = (ctypes.c_uint32 * 6)()
    _check(_libc.capset(ctypes.byref(header), ctypes.byref(none)), "capset")


def _check(result: int, what: str) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
