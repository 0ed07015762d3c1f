"""Hosts on one network: namespaces of this machine, joined by a bridge in a namespace of its own.

Invariant: nothing of it is in the machine's own network, and all its names begin with one prefix that is this object's
alone. `close` ends what still runs in the namespaces, by process id, and removes them; links go with them.
"""

import ctypes
import os
import secrets
import signal
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Final, Self

SUBNET: Final = "10.77.0"
_LONG_LINK: Final = Path(__file__).with_name("long_link.py")
_FOLDER: Final = Path("/run/netns")


class Network:
    """Made with `with`; hosts are added by `host`. Needs root."""

    def __init__(self) -> None:
        self._prefix = f"ebb-{secrets.token_hex(3)}"
        self._hosts: dict[str, str] = {}  # name -> address
        self._relays: list[subprocess.Popen[bytes]] = []
        self._hub = f"{self._prefix}-hub"

    def __enter__(self) -> Self:
        try:
            _ip("netns", "add", self._hub)
            _ip("-n", self._hub, "link", "add", "bridge", "type", "bridge")
            _ip("-n", self._hub, "link", "set", "dev", "bridge", "up")
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def host(self, name: str, *, latency_s: float = 0.0, loss: float = 0.0) -> str:
        """Add a host and return its address. With latency or loss (each way) its link is a process, not a cable."""
        space, address = self._space(name), f"{SUBNET}.{len(self._hosts) + 1}"
        self._hosts[name] = address
        _ip("netns", "add", space)
        _ip("-n", space, "link", "set", "dev", "lo", "up")
        if latency_s or loss:
            self._long_link(name, latency_s, loss)
        else:
            _ip("-n", self._hub, "link", "add", "name", name, "type", "veth", "peer", "name", "eth0", "netns", space)
        _ip("-n", self._hub, "link", "set", "dev", name, "master", "bridge", "up")
        _ip("-n", space, "address", "add", f"{address}/24", "dev", "eth0")
        _ip("-n", space, "link", "set", "dev", "eth0", "up")
        return address

    def address(self, name: str) -> str:
        return self._hosts[name]

    def on(self, name: str, *command: str) -> tuple[str, ...]:
        """The command line that runs `command` on a host, as the very process that it is started as."""
        return ("nsenter", f"--net={_FOLDER / self._space(name)}", *command)

    def cut(self, name: str) -> None:
        """Pull a host's cable: what is sent is lost, and nobody is told."""
        _ip("-n", self._hub, "link", "set", "dev", name, "down")

    def mend(self, name: str) -> None:
        _ip("-n", self._hub, "link", "set", "dev", name, "up")

    def limit(self, name: str, bits_per_s: int) -> None:
        """Let a host send no faster than so."""
        rate = ("rate", str(bits_per_s), "burst", "128kb", "latency", "200ms")
        _run("tc", "-n", self._space(name), "qdisc", "replace", "dev", "eth0", "root", "tbf", *rate)

    def close(self) -> None:
        for relay in self._relays:
            relay.kill()
            relay.wait()
        for space in [*map(self._space, self._hosts), self._hub]:
            if not (_FOLDER / space).exists():
                continue
            for pid in _run("ip", "netns", "pids", space).split():
                os.kill(int(pid), signal.SIGKILL)
            _ip("netns", "delete", space)

    def _space(self, name: str) -> str:
        return f"{self._prefix}-{name}"

    def _long_link(self, name: str, latency_s: float, loss: float) -> None:
        """Returns once both of its ends are there."""
        hub = _FOLDER / self._hub
        command = self.on(name, sys.executable, str(_LONG_LINK), str(hub), name, str(latency_s), str(loss))
        relay = subprocess.Popen(command, stdout=subprocess.PIPE, preexec_fn=_die_with_parent)  # noqa: PLW1509
        self._relays.append(relay)
        assert relay.stdout is not None
        with relay.stdout as said:
            if said.readline() != b"READY\n":
                raise RuntimeError(f"the long link of {name} did not start")


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _ip(*words: str) -> str:
    return _run("ip", *words)


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout
