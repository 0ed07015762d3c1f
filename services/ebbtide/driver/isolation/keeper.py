"""Makes one process of environment code and ends it: `python -m ebbtide.driver.isolation.keeper SOCKET PLAN`.

The keeper runs no environment code. It isolates its child (namespaces, another user, a private root), limits it, and
says on the socket whether that worked. It leaves with the child's status. Once its input closes, as the driver ends the
process or dies, it kills all that the child started.

Invariant: the keeper is started with neither the driver's memory nor its environment variables and open files, so no
process below it has them.
"""

import contextlib
import fcntl
import os
import pwd
import resource
import select
import signal
import socket
import struct
import sys
import traceback
from pathlib import Path
from typing import Final, NamedTuple, NoReturn

import msgspec

from ebbtide.driver.isolation import linux_calls as linux
from ebbtide.driver.isolation.environment_host import serve
from ebbtide.driver.isolation.host_messages import HostPlan, HostStarted, frame
from ebbtide.driver.isolation.private_root import enter_private_root

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
        linux.adopt_orphans()
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
        linux.die_with_parent()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # the keeper's input is for the keeper
        if namespaces:
            _raise_loopback(plan)
            enter_private_root(plan.readable, plan.secrets)
        _limit(plan)
        _become(user)
        if plan.isolated:
            linux.give_up_privileges()
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
    flags = linux.CLONE_NEWNS | linux.CLONE_NEWPID | linux.CLONE_NEWIPC | (0 if plan.network else linux.CLONE_NEWNET)
    if plan.user:
        with contextlib.suppress(OSError):  # as in a container, which takes this right from its root
            linux.unshare(flags)
            return True
        return False
    uid, gid = os.getuid(), os.getgid()
    linux.unshare(flags | linux.CLONE_NEWUSER)
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
        linux.die_with_parent()


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
