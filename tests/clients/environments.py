"""An environment of its own for each client, and one run of a client's script in it.

Environments lie in `.cache/clients`, and are made anew when their pins change.
"""

import hashlib
import json
import os
import signal
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import Struct

from tests.clients.stand import Stand

ROOT: Final = Path(__file__).parents[2]
_HERE: Final = Path(__file__).parent
_CACHE: Final = ROOT / ".cache" / "clients"
_INSTALL_S: Final = 900.0
#: On a loaded machine imports alone take minutes.
_RUN_S: Final = 900.0
#: What would make clients behave otherwise than by default, or look for something beyond the loopback.
_QUIET: Final = {
    "HF_HUB_OFFLINE": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
_LEFT_OUT: Final = ("EBBTIDE_", "PYTHON", "OPENAI_", "ANTHROPIC_", "HF_", "VLLM_")


class ClientPlan(Struct, frozen=True, kw_only=True):
    """A client: what its environment has, or `pins` empty for Ebbtide's own; and the script that plays it."""

    name: str
    script: str
    pins: tuple[str, ...] = ()


class Failed(Exception):
    """The reason why a client could not be installed or run, as a sentence for its row."""


def client_plans() -> list[ClientPlan]:
    """Those of `clients.toml`."""
    return msgspec.convert(tomllib.loads((_HERE / "clients.toml").read_text())["client"], list[ClientPlan])


def made_environment(plan: ClientPlan) -> Path:
    """The Python of a client. Raises `Failed`."""
    if not plan.pins:
        return Path(sys.executable)
    folder = _CACHE / plan.name
    python, stamp = folder / "bin" / "python", folder / "pins"
    wanted = hashlib.sha256("\n".join(plan.pins).encode()).hexdigest()
    if stamp.exists() and stamp.read_text() == wanted:
        return python
    _CACHE.mkdir(parents=True, exist_ok=True)
    venv = [sys.executable, "-m", "venv", "--clear", str(folder)]
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "--no-input", "install", "-q", *plan.pins]
    for command in (venv, pip):
        try:
            _run(command, _outside() | _proxies(), _INSTALL_S, install_log(plan))
        except Failed:
            raise Failed("its packages could not be installed") from None
    stamp.write_text(wanted)
    return python


def install_log(plan: ClientPlan) -> Path:
    """What the last command wrote that made its environment."""
    return _CACHE / f"{plan.name}.log"


def played(plan: ClientPlan, python: Path, stand: Stand, folder: Path) -> list[dict[str, Any]]:
    """What the client's script told, until it ended or failed. Raises `Failed` if it told nothing."""
    folder.mkdir(parents=True, exist_ok=True)
    told = folder / "told.jsonl"
    told.unlink(missing_ok=True)
    own = {"CLIENT": plan.name, "URL": stand.url, "KEY": stand.key, "RUN": stand.run_id, "MODEL": str(stand.model)}
    environment = {f"EBBTIDE_{name}": value for name, value in own.items()} | {"EBBTIDE_TOLD": str(told)}
    environment |= _outside() | _QUIET | {"PYTHONPATH": str(_HERE / "scripts")}
    failure: Failed | None = None
    try:
        _run([str(python), str(_HERE / "scripts" / plan.script)], environment, _RUN_S, folder / "log.txt", folder)
    except Failed as error:
        failure = error
    lines = [json.loads(line) for line in told.read_text().splitlines()] if told.exists() else []
    return [*lines, {"failed": str(failure)}] if failure else lines


def _outside() -> dict[str, str]:
    """What a shell of a user has that knows nothing of this one, nor of a proxy: the gateway is on the loopback."""
    own = _proxies()
    return {name: value for name, value in os.environ.items() if not name.startswith(_LEFT_OUT) and name not in own}


def _proxies() -> dict[str, str]:
    """What only an installation needs."""
    return {name: value for name, value in os.environ.items() if name.lower().endswith("_proxy")}


def _run(command: list[str], environment: dict[str, str], limit_s: float, log: Path, cwd: Path | None = None) -> None:
    """Raises `Failed` with the last line that says why. `log` has what this run wrote, whether it ended or not."""
    with log.open("w") as file:
        process = subprocess.Popen(
            command, env=environment, cwd=cwd, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            status = process.wait(limit_s)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)  # with what it has started
            process.wait()
            if isinstance(error, subprocess.TimeoutExpired):
                raise Failed(f"did not end within {limit_s:.0f} s") from None
            raise
    if status:
        lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
        errors = [line for line in lines if "rror" in line or "refused" in line]
        raise Failed((errors or lines or [f"exit status {status}"])[-1][:300])
