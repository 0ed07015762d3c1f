"""Fresh Debian machines with systemd as their first process: podman containers on a network of their own.

Invariant: containers, network and image bear names that begin with this object's prefix, and `close` removes all that
do. Podman runs with runc and limits that a container may have everywhere.
"""

import json
import os
import secrets
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Self

_CONF: Final = """\
[containers]
default_ulimits = ["nofile=1024:4096","nproc=1024:4096"]
[engine]
runtime = "runc"
"""
_PACKAGES: Final = "systemd,systemd-sysv,dbus,ca-certificates,iproute2"
_BOOT_S: Final = 60
#: The page's own first run of each container: packages of some gigabytes.
_LONGEST_S: Final = 1800


class Containers:
    """`names`: of the hosts. Made with `with`; needs root, podman and debootstrap."""

    def __init__(self, directory: Path, names: Sequence[str]) -> None:
        self._directory, self.names = directory, names
        self._prefix = f"ebbtide-bare-{secrets.token_hex(3)}"
        conf = directory / "containers.conf"
        conf.write_text(_CONF)
        self.environment = os.environ | {"CONTAINERS_CONF": str(conf)}

    def __enter__(self) -> Self:
        try:
            self._image()
            self._podman("network", "create", self._prefix)
            for name in self.names:
                self._start(name)
            self._name_each_other()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def hosts_file(self) -> str:
        """What each machine has in /etc/hosts."""
        return "127.0.0.1 localhost\n" + "".join(f"{self._address(name)} {name}\n" for name in self.names)

    def container(self, name: str) -> str:
        return f"{self._prefix}-{name}"

    def run(self, name: str, commands: str) -> "subprocess.CompletedProcess[str]":
        """Run commands in a login shell of root, to their end."""
        shell = ("bash", "--login", "-euo", "pipefail", "-c", commands)
        command = ["podman", "exec", "--env", "DEBIAN_FRONTEND=noninteractive", self.container(name), *shell]
        return subprocess.run(
            command, env=self.environment, capture_output=True, text=True, check=False, timeout=_LONGEST_S
        )

    def close(self) -> None:
        for name in self.names:
            self._podman("rm", "--force", "--time", "5", "--volumes", self.container(name), check=False)
        self._podman("network", "rm", "--force", self._prefix, check=False)
        self._podman("rmi", "--force", f"localhost/{self._prefix}", check=False)

    def _image(self) -> None:
        """A minimal Debian, made from its packages."""
        root, archive = self._directory / "root", self._directory / "root.tar"
        _run("debootstrap", "--variant=minbase", f"--include={_PACKAGES}", "bookworm", str(root))
        _run("tar", "--create", f"--directory={root}", f"--file={archive}", ".")
        self._podman("import", str(archive), f"localhost/{self._prefix}")
        shutil.rmtree(root)
        archive.unlink()

    def _start(self, name: str) -> None:
        options = ["--systemd=always", "--privileged", "--shm-size=1g", f"--hostname={name}"]
        mounts = [f"--volume={path}:{inside}:ro" for path, inside in self._package_settings()]
        where = [f"--network={self._prefix}", f"--name={self.container(name)}"]
        self._podman("run", "--detach", *where, *options, *mounts, f"localhost/{self._prefix}", "/sbin/init")
        end = time.monotonic() + _BOOT_S
        while (up := self.run(name, "systemctl is-system-running")).stdout.strip() != "running":
            if time.monotonic() > end:
                raise RuntimeError(f"{name} did not boot in {_BOOT_S} s: {up.stdout}{up.stderr}")
            time.sleep(0.2)

    def _package_settings(self) -> list[tuple[Path, str]]:
        """How this machine gets packages: pip's settings, folders that these name, and whom it trusts.

        The containers are given them for the test, and the images know nothing of it.
        """
        listed = _run("python3", "-m", "pip", "config", "list").splitlines()
        settings = {line.partition("=")[0].partition(".")[2]: line.partition("=")[2].strip("'\"") for line in listed}
        conf = self._directory / "pip.conf"
        conf.write_text("[global]\n" + "".join(f"{key} = {value}\n" for key, value in settings.items()))
        words = [word.removeprefix("file://") for value in settings.values() for word in value.split()]
        tops = {Path(*Path(word).parts[:3]) for word in words if word.startswith("/") and not word.startswith("/etc/")}
        files = {Path(word) for word in words if word.startswith("/etc/")} | {
            Path("/etc/ssl/certs/ca-certificates.crt")
        }
        lent = sorted({top for top in tops if top.exists()} | {file for file in files if file.is_file()})
        return [(conf, "/etc/pip.conf"), *((path, str(path)) for path in lent)]

    def _name_each_other(self) -> None:
        for name in self.names:
            done = self.run(name, f"cat > /etc/hosts <<'END'\n{self.hosts_file}END")
            assert done.returncode == 0, done.stderr

    def _address(self, name: str) -> str:
        (told,) = json.loads(self._podman("inspect", self.container(name)))
        address: str = told["NetworkSettings"]["Networks"][self._prefix]["IPAddress"]
        return address

    def _podman(self, *words: str, check: bool = True) -> str:
        return _run("podman", *words, environment=self.environment, check=check)


def _run(*command: str, environment: dict[str, str] | None = None, check: bool = True) -> str:
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if check and done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()[-2000:]}")
    return done.stdout
