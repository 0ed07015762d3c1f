"""SDK and command install without an extra and work; each service installs with its own extra alone, and starts.

The trainer's is installed behind the PyTorch that `TORCH` names, as in `make env`. What the worker's brings is
gigabytes: it is resolved, alone and together with the trainer's, and not installed, except for the demo, which runs on
vLLM's CPU build as requirements/cpu.txt pins it.
"""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

from ebbtide.cli.commands.serve import SERVICES
from ebbtide.client import SyncClient
from tests.support.redis_servers import EmbeddedRedis

ROOT: Final = Path(__file__).parents[2]
INHERITED: Final = {name: value for name, value in os.environ.items() if not name.startswith(("EBBTIDE_", "PYTHON"))}
TOKEN: Final = "a-token-of-tests"
#: What a host with this extra has no use for; the SDK is what has none.
FOREIGN: Final = {
    "": ("torch", "vllm", "redis", "numba", "uvloop", "structlog"),
    "coordinator": ("torch", "vllm", "numba", "matplotlib"),
    "relay": ("torch", "vllm", "redis", "matplotlib"),
    "guard": ("torch", "vllm", "redis", "numba"),
    "gateway": ("torch", "vllm", "redis", "numba", "matplotlib"),
    "cli": ("torch", "vllm", "redis", "numba", "matplotlib"),
    "simulate": ("torch", "vllm", "numba", "httptools", "aiohttp"),
    "fast": ("torch", "vllm", "redis", "uvloop", "structlog"),
    "trainer": ("vllm", "redis", "httptools", "matplotlib"),  # typer comes with transformers
    "data,math": ("torch", "vllm", "redis", "structlog"),
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
    """A Python that has the wheel with one extra, or with none."""
    extra = request.param
    venv.create(tmp_path / "env", with_pip=True)
    python = str(tmp_path / "env" / "bin" / "python")
    if extra == "trainer":
        run(python, "-m", "pip", "install", "-q", *shlex.split(os.environ.get("TORCH", "torch==2.13.0")))
    run(python, "-m", "pip", "install", "-q", f"{wheel}[{extra}]" if extra else str(wheel))
    for module in FOREIGN[extra]:
        code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is not None)"
        assert run(python, "-c", code).returncode == 0, f"{extra} brings {module}"
    return python


def run(*command: str) -> "subprocess.CompletedProcess[str]":
    done = subprocess.run(command, cwd="/", env=INHERITED, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done


@contextmanager
def serving(python: str, *command: str) -> Iterator[str]:
    """Start a service, wait until it says that it is ready, yield its address, and let it end."""
    environment = INHERITED | {"EBBTIDE_TOKEN": TOKEN}
    process = subprocess.Popen(
        [python, "-m", *command], cwd="/", env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        first = process.stdout.readline().split()
        if first[:1] == ["READY"]:
            yield first[2]
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert first[:1] == ["READY"], log
    assert process.returncode == 0, log


@contextmanager
def coordinator(python: str = sys.executable) -> Iterator[str]:
    with EmbeddedRedis() as redis:
        flags = ("--server-listen", "127.0.0.1:0", "--store-url", redis.url)
        with serving(python, "ebbtide.coordinator", *flags) as address:
            yield address


def spec(model: object) -> dict[str, Any]:
    """Of a run whose trainer does not come."""
    return {"name": "r", "model": str(model), "environment": {"name": "agents"}}


@pytest.mark.parametrize("python", [""], indirect=True)
def test_the_sdk_needs_no_extra(python: str) -> None:
    code = f"""
from ebbtide.client import SyncClient
with SyncClient(ADDRESS, token={TOKEN!r}) as client:
    run = client.submit({spec("/models/m")})
    print([found.run_id for found in client.runs()] == [run.run_id])
"""
    with coordinator() as address:
        assert run(python, "-c", code.replace("ADDRESS", repr(address))).stdout == "True\n"


@pytest.mark.parametrize("python", ["coordinator"], indirect=True)
def test_a_coordinator_needs_its_own_extra_alone(python: str) -> None:
    assert "--store-url" in run(python, "-m", "ebbtide.coordinator", "--help").stdout
    with coordinator(python):
        pass


@pytest.mark.parametrize("python", ["relay"], indirect=True)
def test_a_relay_needs_its_own_extra_alone(python: str, tmp_path: Path) -> None:
    assert "--data-dir" in run(python, "-m", "ebbtide.weight_relay", "--help").stdout
    flags = ("--server-listen", "127.0.0.1:0", "--data-dir", str(tmp_path / "data"))
    with serving(python, "ebbtide.weight_relay", *flags):
        pass


@pytest.mark.parametrize("python", ["guard"], indirect=True)
def test_a_guard_needs_its_own_extra_alone(python: str) -> None:
    assert "--upstream" in run(python, "-m", "ebbtide.serving_guard", "--help").stdout


@pytest.mark.parametrize("python", ["gateway"], indirect=True)
def test_a_gateway_needs_its_own_extra_alone(python: str, tiny_model: Path) -> None:
    assert "--door-token-keys" in run(python, "-m", "ebbtide.gateway", "--help").stdout
    flags = ("--listen", "127.0.0.1:0", "--coordinator")
    with coordinator() as address, serving(python, "ebbtide.gateway", *flags, address) as gateway:
        with SyncClient(address, token=TOKEN) as client:
            model = client.submit(spec(tiny_model)).run_id
        body = {"model": model, "messages": [{"role": "user", "content": "stone"}]}
        head = {"Authorization": f"Bearer {TOKEN}"}
        answer = httpx.post(f"http://{gateway}/tokenize", json=body, headers=head, timeout=60)
    assert answer.json()["count"] >= len("stone"), answer.text


@pytest.mark.parametrize("python", ["cli"], indirect=True)
def test_the_command_line_needs_its_own_extra_alone(python: str) -> None:
    assert "submit" in run(python, "-m", "ebbtide.cli", "run", "--help").stdout
    assert "--dir" in run(python, "-m", "ebbtide.cli", "certs", "init", "--help").stdout
    for words in (*(("serve", name) for name in SERVICES), ("weights", "export"), ("base-model",), ("health",)):
        assert "usage" in run(python, "-m", "ebbtide.cli", *words, "--help").stdout.lower(), words


@pytest.mark.parametrize("python", ["simulate"], indirect=True)
def test_a_simulation_needs_its_own_extra_alone(python: str, tmp_path: Path) -> None:
    listed = run(python, "-m", "ebbtide.cli", "simulate", "--list").stdout
    (example,) = [word for word in listed.split() if word.endswith("first.toml")]
    files = {"--json": tmp_path / "figures.json", "--png": tmp_path / "fleet.png"}
    flags = [str(word) for pair in files.items() for word in pair]
    assert "step, median" in run(python, "-m", "ebbtide.cli", "simulate", example, *flags).stdout
    assert all(file.stat().st_size > 0 for file in files.values())


@pytest.mark.parametrize("python", ["data,math"], indirect=True)
def test_data_sets_are_read_from_parquet_and_from_a_cache_of_the_hub_and_mathematics_is_verified(python: str) -> None:
    probe = Path(__file__).with_name("data_probe.py")
    assert json.loads(run(python, str(probe)).stdout.splitlines()[-1]) == {
        "parquet": [7, 7],
        "hub": ["test 7", "seven"],
        "absent": "environment.params.data",
        "remedy": True,
        "own": [True, True],
        "equal": [1.0, 1.0, 1.0, 1.0, 0.0, 0.0],
    }


@pytest.mark.parametrize("python", ["fast"], indirect=True)
def test_patches_are_compiled_with_one_small_extra(python: str) -> None:
    code = """
import numpy as np
from ebbtide.weights.patch import TileCodec
base = np.arange(4096, dtype=np.uint16)
new = base.copy()
new[7] += 1
patched = base.copy()
TileCodec(2).apply(TileCodec(2).encode(base, new), patched)
print(np.array_equal(patched, new))
"""
    assert run(python, "-c", code).stdout == "True\n"


@pytest.mark.parametrize("python", ["trainer"], indirect=True)
def test_trainer_and_driver_need_their_own_extra_alone(python: str) -> None:
    assert "--rank-timeout-s" in run(python, "-m", "ebbtide.trainer", "--help").stdout
    assert "--environments-allowed" in run(python, "-m", "ebbtide.driver", "--help").stdout
    code = "import ebbtide.trainer.learning.local_learning, ebbtide.driver.service"
    assert run(python, "-c", code).returncode == 0


@pytest.mark.parametrize("extras", ["worker", "worker,trainer,cli"])
def test_a_gpu_host_gets_the_vllm_that_was_tried_and_a_torch_that_fits_it(
    wheel: Path, extras: str, tmp_path: Path
) -> None:
    if (uv := shutil.which("uv")) is None:
        pytest.skip("needs uv, which resolves by metadata alone: pip downloads gigabytes to read it")
    asked = tmp_path / "asked.txt"
    asked.write_text(f"ebbtide[{extras}] @ {wheel.as_uri()}\n")
    options = ("--python-version", "3.11", "--python-platform", "x86_64-manylinux_2_36", "--no-annotate")
    run(uv, "pip", "compile", "--quiet", *options, "--output-file", str(tmp_path / "found.txt"), str(asked))
    found = (tmp_path / "found.txt").read_text().splitlines()
    lock = (ROOT / "requirements" / "cuda.txt").read_text()
    for name in ("vllm", "torch"):
        (pin,) = (line for line in found if line.startswith(f"{name}=="))
        assert f"\n{pin} " in lock
    assert any(line.startswith("reasoning-gym==") for line in found) == ("trainer" in extras)
