"""The lists that images are laid out from say what pyproject.toml and the lock say."""

import subprocess
import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
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
