"""The machine that the page calls admin: this one, with a home of its own, and `scp` as a copy into containers."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

from tests.bare.containers import Containers

ROOT: Final = Path(__file__).parents[2]
_SCP: Final = """\
#!{python}
import subprocess, sys
def place(path):
    host, colon, rest = path.partition(":")
    return f"{prefix}{{host}}:{{rest}}" if colon else path
*sources, target = [place(word) for word in sys.argv[1:] if word != "-r"]
for source in sources:
    subprocess.run(["podman", "cp", source, target], check=True)
"""


class Admin:
    """A shell that keeps its folder and variables from block to block, as a person's does."""

    def __init__(self, directory: Path, containers: Containers) -> None:
        self._state = directory / "state.sh"
        self._checkout, home, shims = directory / "checkout", directory / "home", directory / "shims"
        for folder in (home, shims):
            folder.mkdir()
        self._copy_checkout()
        (shims / "scp").write_text(_SCP.format(python=sys.executable, prefix=containers.container("")))
        (shims / "scp").chmod(0o755)
        self._hosts = directory / "hosts"
        self._hosts.write_text(containers.hosts_file)
        inherited = {name: value for name, value in containers.environment.items() if not name.startswith("EBBTIDE_")}
        self._environment = inherited | {"HOME": str(home), "PATH": f"{shims}:{os.environ['PATH']}"}
        self._state.write_text(f"cd {self._checkout}\n")

    def run(self, commands: str) -> "subprocess.CompletedProcess[str]":
        """Run commands in a mount namespace in which /etc/hosts names the containers."""
        script = (
            f"mount --bind {self._hosts} /etc/hosts\n. {self._state}\n{commands}\n"
            f"export -p > {self._state}\nprintf 'cd %q\\n' \"$PWD\" >> {self._state}"
        )
        command = ["unshare", "--mount", "--propagation=private", "bash", "-euo", "pipefail", "-c", script]
        return subprocess.run(command, env=self._environment, capture_output=True, text=True, check=False, timeout=1800)

    def _copy_checkout(self) -> None:
        """What git knows, and what was changed of it."""
        names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout.decode()
        for name in filter(None, names.split("\0")):
            if (ROOT / name).exists():
                (self._checkout / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, self._checkout / name)
