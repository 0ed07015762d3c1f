"""Makes one process of environment code and ends it: `python -m ebbtide.driver.sandbox SOCKET PLAN`.

The keeper runs no environment code. It isolates its child (namespaces, another user, a private root), limits it, and
says on the socket whether that worked. It leaves with the child's status. Once its input closes, as the driver ends the
process or dies, it kills all that the child started.

Invariant: the keeper is started with neither the driver's memory nor its environment variables and open files, so no
process below it has them.
"""

import contextlib
import ctypes
import fcntl
import os
import platform
import pwd
import resource
import select
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple, NoReturn

import msgspec

from ebbtide.driver.environment_host import HostPlan, HostStarted, frame, serve

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


# Builds a root directory of its own for environment code: Python, libraries, named folders, all of it read-only.
#
# Nothing else of the host is there: no home, no state of services, no socket, no `/sys`. Files with secrets that lie
# in a folder which is there are covered. `/tmp` and `/dev/shm` are new, in memory and bounded.

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
    mount("none", "/", "", MS_REC | MS_PRIVATE)
    mount("tmpfs", _PLACE, "tmpfs", MS_NOSUID | MS_NODEV, _WRITABLE)
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
        mount("proc", f"{_PLACE}/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    enter_root(_PLACE)


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
    mount(path, str(target), "", MS_BIND | MS_REC)
    seal(str(target), devices=devices)


def _devices() -> None:
    for name in _DEVICES:
        _show(f"/dev/{name}", devices=True)
    for name, target in (("fd", "fd"), ("stdin", "fd/0"), ("stdout", "fd/1"), ("stderr", "fd/2")):
        Path(_PLACE, "dev", name).symlink_to(f"/proc/self/{target}")


def _cover(secret: str) -> None:
    """Covers a file that is seen, as in a folder that is shown."""
    for path in {os.path.abspath(secret), os.path.realpath(secret)}:  # noqa: PTH100 - links stay
        if Path(_PLACE + path).exists():
            mount("/dev/null", _PLACE + path, "", MS_BIND)


#: Processes and threads of an isolated environment, and its open files.
_MAX_TASKS: Final = 256
_MAX_FILES: Final = 1024
#: Another user's number inside a user namespace: code that is user 0 there would regain capabilities.
_INSIDE: Final = 65534
_SIOCSIFFLAGS: Final = 0x8914
_IFF_UP: Final = 1


class _User(NamedTuple):
    uid: int
    gid: int


class _NotAllowed(Exception):
    """The host does not allow the isolation."""


def main() -> NoReturn:
    connection = socket.socket(fileno=int(sys.argv[1]))
    plan = msgspec.json.decode(sys.argv[2], type=HostPlan)
    try:
        Path("/proc/self/oom_score_adj").write_text("1000")  # the kernel ends it before it ends a service
        adopt_orphans()
        user = _user(plan.user) if plan.isolated and plan.user else None
        namespaces = plan.isolated and _unshare(plan)
        child = os.fork()
    except (OSError, _NotAllowed) as error:
        _refuse(connection, error)
    if not child:
        _run_host(plan, connection, user, namespaces=namespaces)
    connection.close()
    status = _wait(child)
    if not namespaces:  # otherwise the child was the first process of its namespace, and all others are gone
        _kill_children()
    os._exit(status)


def _run_host(plan: HostPlan, connection: socket.socket, user: _User | None, *, namespaces: bool) -> NoReturn:
    """In the child: isolates and limits it, then serves calls."""
    try:
        die_with_parent()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # the keeper's input is for the keeper
        if namespaces:
            _raise_loopback(plan)
            enter_private_root(plan.readable, plan.secrets)
        _limit(plan)
        _become(user)
        if plan.isolated:
            give_up_privileges()
            _check_secrets(plan)
        if namespaces and (child := os.fork()):
            _reap_for(child)
    except (OSError, ValueError, _NotAllowed) as error:
        _refuse(connection, error)
    sys.path[:0] = plan.paths  # from here on, so that nothing of it runs before
    try:
        connection.sendall(frame(HostStarted(open_network=plan.isolated and not namespaces and not plan.network)))
        serve(connection)
    except BrokenPipeError:  # the driver has let go
        pass
    except BaseException:  # noqa: BLE001 - whatever it is, this process must not go on as a keeper
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def _unshare(plan: HostPlan) -> bool:
    """Enters namespaces of its own. Returns False where only root's right to become another user is left."""
    flags = CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWIPC | (0 if plan.network else CLONE_NEWNET)
    if plan.user:
        with contextlib.suppress(OSError):  # as in a container, which takes this right from its root
            unshare(flags)
            return True
        return False
    uid, gid = os.getuid(), os.getgid()
    unshare(flags | CLONE_NEWUSER)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{uid or _INSIDE} {uid} 1")
    Path("/proc/self/gid_map").write_text(f"{gid or _INSIDE} {gid} 1")
    with contextlib.suppress(OSError):  # no namespaces within this one: less of the kernel to attack
        Path("/proc/sys/user/max_user_namespaces").write_text("0")
    return True


def _user(name: str) -> _User:
    try:
        entry = pwd.getpwnam(name)
    except KeyError:
        raise _NotAllowed(f"environments.user names {name!r}, and there is no such user") from None
    if entry.pw_uid == 0:
        raise _NotAllowed(f"environments.user is {name!r}, which is root; name another user")
    return _User(entry.pw_uid, entry.pw_gid)


def _raise_loopback(plan: HostPlan) -> None:
    """Brings up the loopback, the only link of a new network namespace."""
    if plan.network:
        return
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket, contextlib.suppress(OSError):
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sh22x", b"lo", _IFF_UP))


def _limit(plan: HostPlan) -> None:
    os.nice(plan.nice)
    limits = {resource.RLIMIT_AS: plan.memory_bytes, resource.RLIMIT_CORE: 0, resource.RLIMIT_NOFILE: _MAX_FILES}
    if plan.isolated:  # it counts all tasks of the user, which here is the environment's alone
        limits[resource.RLIMIT_NPROC] = _MAX_TASKS
    for kind, wanted in limits.items():
        _, hard = resource.getrlimit(kind)
        limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(kind, (limit, limit))


def _become(user: _User | None) -> None:
    if user is not None:
        os.setgroups([])
        os.setresgid(user.gid, user.gid, user.gid)
        os.setresuid(user.uid, user.uid, user.uid)
        die_with_parent()


def _check_secrets(plan: HostPlan) -> None:
    for path in plan.secrets:
        with contextlib.suppress(OSError):
            if Path(path).read_bytes():
                raise _NotAllowed(f"{path} can be read by every user of this host; chmod 600 it")


def _reap_for(child: int) -> NoReturn:
    """In the first process of a PID namespace: reaps all others, and leaves with `child`."""
    while True:
        pid, status = os.wait()
        if pid == child:
            os._exit(_code(status))


def _wait(child: int) -> int:
    """Waits until the child ends, or the driver lets go."""
    watched = os.pidfd_open(child)
    poll = select.poll()
    poll.register(watched, select.POLLIN)
    poll.register(0, select.POLLIN | select.POLLHUP)
    if watched not in dict(poll.poll()):
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    return _code(status)


def _code(status: int) -> int:
    """Of a wait status, the exit status as shells tell it: 128 and the signal's number for a signal."""
    return 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.waitstatus_to_exitcode(status)


def _kill_children() -> None:
    """Kills what the child left behind: orphans become children of this process, one generation after the other."""
    tasks = Path("/proc/self/task")
    with contextlib.suppress(ChildProcessError):
        while True:
            for task in tasks.iterdir():
                for pid in map(int, (task / "children").read_text().split()):
                    os.kill(pid, signal.SIGKILL)
            os.wait()


def _refuse(connection: socket.socket, error: Exception) -> NoReturn:
    connection.sendall(frame(HostStarted(refused=str(error) or type(error).__name__)))
    os._exit(1)


if __name__ == "__main__":
    main()
