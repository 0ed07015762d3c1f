"""Each service installs with its own extra and nothing else, and starts. (Those of trainer and worker are gigabytes:
`make test-bare` installs the trainer's, and on the worker vLLM's CPU build from its pins instead.)"""

import os
import signal
import subprocess
import sys
import venv
from pathlib import Path
from typing import Final

import pytest

from ebbtide.testing import EmbeddedRedis

ROOT: Final = Path(__file__).parents[2]
INHERITED: Final = {name: value for name, value in os.environ.items() if not name.startswith(("EBBTIDE_", "PYTHON"))}
#: What a host with this extra has no use for.
FOREIGN: Final = {
    "coordinator": ("torch", "vllm", "numba", "typer", "matplotlib"),
    "relay": ("torch", "vllm", "redis", "typer", "matplotlib"),
    "guard": ("torch", "vllm", "redis", "numba", "typer"),
    "gateway": ("torch", "vllm", "redis", "numba", "matplotlib"),
    "cli": ("torch", "vllm", "redis", "numba", "matplotlib"),
    "simulate": ("torch", "vllm", "numba", "httptools", "aiohttp"),
}
pytestmark = [pytest.mark.extras, pytest.mark.timeout(900)]


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(folder), str(ROOT))
    (found,) = folder.glob("ebbtide-*.whl")
    return found


@pytest.fixture
def python(request: pytest.FixtureRequest, wheel: Path, tmp_path: Path) -> str:
    """A Python that has the wheel with one extra."""
    extra = request.param
    venv.create(tmp_path / "env", with_pip=True)
    python = str(tmp_path / "env" / "bin" / "python")
    run(python, "-m", "pip", "install", "-q", f"{wheel}[{extra}]")
    for module in FOREIGN[extra]:
        code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is not None)"
        assert run(python, "-c", code).returncode == 0, f"{extra} brings {module}"
    return python


def run(*command: str) -> "subprocess.CompletedProcess[str]":
    done = subprocess.run(command, cwd="/", env=INHERITED, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done


def starts_and_ends(python: str, *command: str) -> None:
    """Start a service, wait until it says that it is ready, and let it end."""
    environment = INHERITED | {"EBBTIDE_TOKEN": "a-token-of-tests"}
    process = subprocess.Popen(
        [python, "-m", *command], cwd="/", env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        first = process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert first.startswith("READY "), log
    assert process.returncode == 0, log


@pytest.mark.parametrize("python", ["coordinator"], indirect=True)
def test_a_coordinator_needs_its_own_extra_alone(python: str) -> None:
    assert "--store-url" in run(python, "-m", "ebbtide.coordinator", "--help").stdout
    with EmbeddedRedis() as redis:
        flags = ("--server-listen", "127.0.0.1:0", "--store-url", redis.url)
        starts_and_ends(python, "ebbtide.coordinator", *flags)


@pytest.mark.parametrize("python", ["relay"], indirect=True)
def test_a_relay_needs_its_own_extra_alone(python: str, tmp_path: Path) -> None:
    assert "--data-dir" in run(python, "-m", "ebbtide.weight_relay", "--help").stdout
    flags = ("--server-listen", "127.0.0.1:0", "--data-dir", str(tmp_path / "data"))
    starts_and_ends(python, "ebbtide.weight_relay", *flags)


@pytest.mark.parametrize("python", ["guard"], indirect=True)
def test_a_guard_needs_its_own_extra_alone(python: str) -> None:
    assert "--upstream" in run(python, "-m", "ebbtide.serving_guard", "--help").stdout


@pytest.mark.parametrize("python", ["gateway"], indirect=True)
def test_a_gateway_needs_its_own_extra_alone(python: str) -> None:
    assert "--door-token-keys" in run(python, "-m", "ebbtide.gateway", "--help").stdout
    starts_and_ends(python, "ebbtide.gateway", "--listen", "127.0.0.1:0")


@pytest.mark.parametrize("python", ["cli"], indirect=True)
def test_the_command_line_needs_its_own_extra_alone(python: str) -> None:
    assert "submit" in run(python, "-m", "ebbtide.cli", "--help").stdout
    assert "--dir" in run(python, "-m", "ebbtide.cli", "certs", "init", "--help").stdout


@pytest.mark.parametrize("python", ["simulate"], indirect=True)
def test_a_simulation_needs_its_own_extra_alone(python: str, tmp_path: Path) -> None:
    listed = run(python, "-m", "ebbtide.cli", "simulate", "--list").stdout
    (example,) = [word for word in listed.split() if word.endswith("first.toml")]
    files = {"--json": tmp_path / "figures.json", "--png": tmp_path / "fleet.png"}
    flags = [str(word) for pair in files.items() for word in pair]
    assert "step, median" in run(python, "-m", "ebbtide.cli", "simulate", example, *flags).stdout
    assert all(file.stat().st_size > 0 for file in files.values())
