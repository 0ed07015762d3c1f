"""Environments of the libraries that Ebbtide works with, each of its own, made anew when its pins change.

They lie in `.cache/integrations`. `requirements-NAME.txt` has all packages of one, or only what it has beyond
Ebbtide's own environment, which then lies behind it.
"""

import hashlib
import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Final

from tests.chaos.cluster import TOKEN, Cluster

ROOT: Final = Path(__file__).parents[2]
_HERE: Final = Path(__file__).parent
_CACHE: Final = ROOT / ".cache" / "integrations"
_INSTALL_S: Final = 600.0
#: What would lead elsewhere, or to something that a user's own environment does not have.
_LEFT_OUT: Final = ("EBBTIDE_", "PYTHON", "OPENAI_", "HF_", "VLLM_")
_QUIET: Final = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}


def made_environment(name: str, *, behind: bool = False) -> Path:
    """The Python of an environment with the packages of `requirements-NAME.txt`. `behind`: and with Ebbtide's own."""
    pins, folder = _HERE / f"requirements-{name}.txt", _CACHE / name
    wanted = hashlib.sha256(pins.read_bytes() + sys.prefix.encode()).hexdigest()
    python, stamp = folder / "bin" / "python", folder / "pins"
    if stamp.exists() and stamp.read_text() == wanted:
        return python
    _CACHE.mkdir(parents=True, exist_ok=True)
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "--no-input", "install", "-q", "--no-deps"]
    for command in ([sys.executable, "-m", "venv", "--clear", str(folder)], [*pip, "-r", str(pins)]):
        subprocess.run(command, check=True, timeout=_INSTALL_S)
    if behind:
        (packages,) = folder.glob("lib/python*/site-packages")
        (packages / "behind.pth").write_text(sysconfig.get_path("purelib") + "\n")
    stamp.write_text(wanted)
    return python


def variables(cluster: Cluster, **further: str) -> dict[str, str]:
    """Of a user's program that has the SDK, and nothing else of Ebbtide. It asks the loopback alone, by no proxy."""
    found = os.environ.items()
    kept = {k: v for k, v in found if not k.startswith(_LEFT_OUT) and not k.lower().endswith("_proxy")}
    places = {f"EBBTIDE_{name.upper()}": cluster.process[name].address for name in ("coordinator", "relay")}
    return {**kept, **_QUIET, **places, "EBBTIDE_TOKEN": TOKEN, "PYTHONPATH": str(ROOT / "common"), **further}


def script(name: str) -> str:
    return str(_HERE / "scripts" / name)


def tail_of(log: Path, characters: int = 3000) -> str:
    """The end of what a program wrote."""
    return log.read_text(errors="replace")[-characters:]
