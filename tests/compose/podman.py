"""Podman and podman-compose, in a storage of their own.

Invariant: whatever they make (images, containers, volumes, networks, their locks) lies below two folders and is known
nowhere else, so what other people run with podman on this machine is neither seen nor touched. One folder is short, for
sockets, and goes with the process; the other may keep the images.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

#: Where podman-compose may lie, beside the PATH.
TOOLS: Final = Path(".cache/compose-tools")
#: runc: crun refuses hybrid cgroups. Limits: the default ones cannot be set where this runs in a container itself.
#: File locks: those in shared memory are common to all storages of a user. Other folders stay where podman expects them
#: below the storage: what it starts when a container ends is told of the storage alone.
_CONFIGURATION: Final = """\
[containers]
default_ulimits = ["nofile=4096:4096", "nproc=4096:4096"]
[engine]
runtime = "runc"
lock_type = "file"
tmp_dir = "{short}/tmp"
events_logger = "file"
[network]
network_config_dir = "{short}/networks"
"""
_KEPT: Final = "storage"
_STORAGE: Final = '[storage]\ndriver = "overlay"\ngraphroot = "{root}/{kept}"\nrunroot = "{short}/run"\n'


class Failed(Exception):
    """A command failed; the text says which, and what it said last."""


def missing() -> Iterator[str]:
    """What has to be installed first, a line each."""
    if os.geteuid():
        yield "root: containers get networks and volumes of their own here"
    packages = {"podman": "podman", "runc": "runc", "debootstrap": "debootstrap", "iptables": "iptables"}
    if lacking := [package for command, package in packages.items() if not shutil.which(command)]:
        yield f"apt-get install {' '.join(lacking)}"
    if compose_command() is None:
        yield f"python3 -m venv {TOOLS} && {TOOLS}/bin/pip install podman-compose==1.6.0"


def compose_command() -> str | None:
    own = TOOLS / "bin" / "podman-compose"
    return str(own.absolute()) if own.exists() else shutil.which("podman-compose")


class Podman:
    """`environment`: what docker-compose.yml of the folder `checkout` is filled in with. All output of commands goes to
    the file `log` too."""

    def __init__(self, root: Path, project: str, checkout: Path, environment: Mapping[str, str], log: Path) -> None:
        self.root, self.project, self.checkout, self._log = root, project, checkout, log
        self._short = Path(tempfile.mkdtemp(prefix="ebb-", dir="/run"))
        (root / _KEPT).mkdir(parents=True, exist_ok=True)
        for name, text in (("containers.conf", _CONFIGURATION), ("storage.conf", _STORAGE)):
            (self._short / name).write_text(text.format(root=root, short=self._short, kept=_KEPT))
        self._environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("EBBTIDE_")},
            "CONTAINERS_CONF": str(self._short / "containers.conf"),
            "CONTAINERS_STORAGE_CONF": str(self._short / "storage.conf"),
            **environment,
        }

    def fill(self, **environment: str) -> None:
        """Fill docker-compose.yml in with more."""
        self._environment |= environment

    def __call__(self, *arguments: str, timeout_s: float = 120.0, check: bool = True, both: bool = False) -> str:
        """What `podman ARGUMENTS` prints, with `both` to its outputs. Raises `Failed`."""
        return self._run(["podman", *arguments], timeout_s, check=check, both=both)

    def compose(
        self, *arguments: str, profiles: Sequence[str] = (), timeout_s: float = 120.0, check: bool = True
    ) -> str:
        """What podman-compose prints, for the plain file and these profiles. Raises `Failed`."""
        found = compose_command() or "podman-compose"
        chosen = [word for name in profiles for word in ("--profile", name)]
        head = [found, "--in-pod", "false", "--no-ansi", "--project-name", self.project, *chosen]
        return self._run([*head, *arguments], timeout_s, check=check)

    def up(self, *services: str, profiles: Sequence[str] = ()) -> None:
        """Start all, or these, at once: podman before 4.6 knows no order by health, and starts nothing again of whose
        dependencies one has ended, as setup has. So all wait by themselves for what they need."""
        self.compose("up", "--detach", "--no-build", "--no-deps", *services, profiles=profiles, timeout_s=300)

    def logs(self, container: str, *options: str) -> str:
        """What a container wrote, to both of its outputs."""
        return self("logs", *options, container, check=False, both=True)

    def inspect(self, container: str) -> dict[str, Any]:
        found: list[dict[str, Any]] = json.loads(self("container", "inspect", container))
        return found[0]

    def container(self, service: str) -> str:
        """The name of a service's container. Raises `Failed` if it has none."""
        label = f"label=com.docker.compose.service={service}"
        name = self("ps", "--all", "--filter", label, "--format", "{{.Names}}").strip()
        if not name or "\n" in name:
            raise Failed(f"expected one container of {service}, found {name.split() or 'none'}")
        return name

    def left(self) -> list[str]:
        """Containers, volumes and networks of the project, running or not."""
        made = [*self("ps", "--all", "--quiet").split(), *self("volume", "ls", "--quiet").split()]
        networks = self("network", "ls", "--format", "{{.Name}}").split()
        return [*made, *(name for name in networks if name != "podman")]

    def close(self, *, keep: bool) -> None:
        """Remove all that was ever made; with `keep`, all but the images."""
        folders = (str(self.root), str(self._short))
        mounts = Path("/proc/self/mounts").read_text().splitlines()
        below = [path for line in mounts if (path := line.split()[1]).startswith(folders)]
        for path in reversed(below):
            subprocess.run(["umount", path], check=True)
        # Podman's own records name the short folder, and are of no use without it.
        for folder in [self._short, *(self.root / _KEPT / name for name in ("libpod", "volumes"))]:
            shutil.rmtree(folder, ignore_errors=True)
        if not keep:
            shutil.rmtree(self.root)

    def _run(self, command: list[str], timeout_s: float, *, check: bool, both: bool = False) -> str:
        with self._log.open("a") as log:
            log.write(f"$ {' '.join(command)}\n")
            log.flush()
            try:
                done = subprocess.run(
                    command,
                    cwd=self.checkout,
                    env=self._environment,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT if both else log,
                    timeout=timeout_s,
                    check=False,
                )
            except subprocess.TimeoutExpired:
                raise Failed(f"{' '.join(command)} took more than {timeout_s:g} s; see {self._log}") from None
            text = done.stdout.decode(errors="replace")
            log.write(text)
        if check and done.returncode:
            tail = "\n".join(self._log.read_text(errors="replace").splitlines()[-15:])
            raise Failed(f"{' '.join(command)} ended with status {done.returncode}:\n{tail}")
        return text


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)  # noqa: T201 - a command
