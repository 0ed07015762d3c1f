"""The image of docker-compose.yml, built where there may be no registry, and where pip may need this host's settings.

What the host lends to a build (its pip settings, its certificates, folders of wheels) is mounted for the build alone.
`check_clean` holds the image to that.
"""

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tests.compose.podman import Failed, Podman

PYTHON: Final = "python:3.11-slim-bookworm"
_OWN_BASE: Final = "localhost/ebbtide-test-base"
_PIP: Final = Path("/etc/pip.conf")
_SETTING: Final = re.compile(r"^(?:global|install|:env:)\.([a-z-]+)='(.*)'$", re.MULTILINE)
_MIB: Final = 1 << 20


def base_image(podman: Podman) -> str:
    """The official image where it can be pulled, else Debian 12 with its own Python."""
    for name in (_OWN_BASE, PYTHON):
        if podman("images", "--quiet", name).strip():
            return name
    try:
        podman("pull", "--quiet", f"docker.io/library/{PYTHON}", timeout_s=300)
    except Failed:
        _bootstrap(podman)
        return _OWN_BASE
    return f"docker.io/library/{PYTHON}"


def _bootstrap(podman: Podman) -> None:
    packages = "--include=python3,python3-venv,ca-certificates"
    with tempfile.TemporaryDirectory(dir=podman.root) as folder:
        tree, archive = Path(folder) / "tree", Path(folder) / "tree.tar"
        for command in (
            ["debootstrap", "--variant=minbase", packages, "bookworm", str(tree)],
            ["tar", "--directory", str(tree), "--create", "--file", str(archive), "."],
        ):
            done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
            if done.returncode:
                raise Failed(f"{command[0]} failed:\n{done.stdout.decode(errors='replace')[-2000:]}")
        podman("import", str(archive), _OWN_BASE, timeout_s=300)


def build(podman: Podman, folder: Path) -> None:
    """Build the image. What was built before from the same files is kept."""
    mounts = " ".join(f"--volume {source}:{target}:ro" for source, target in host_mounts(folder))
    podman.compose(f"--podman-build-args=--network host {mounts}", "build", "setup", timeout_s=3600)


def host_mounts(folder: Path) -> Iterator[tuple[Path, Path]]:
    """What pip needs here: (on the host, in the build). `folder` is for a file with all settings that are in force."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    settings = dict(_SETTING.findall(listed))
    if not settings:
        return
    file = folder / "pip.conf"
    file.write_text("[global]\n" + "".join(f"{name} = {value}\n" for name, value in settings.items()))
    yield file, _PIP
    paths = {Path(word.removeprefix("file://")) for value in settings.values() for word in value.split()}
    for path in sorted(path for path in paths if path.is_absolute() and path.exists()):
        lent = path.parent if path.name == "simple" else path  # an index's pages lead to files beside it
        yield lent, lent


def check_clean(podman: Podman, image: str, base: str, folder: Path) -> str:
    """Raises `Failed` if an image bears anything that the host lent to its build, or a secret. Returns its size."""
    look = "echo {0}; if [ -d {0} ]; then ls -A {0}; elif [ -e {0} ]; then cat {0}; fi | sha256sum\n"
    script = "".join(look.format(target) for _, target in host_mounts(folder))
    found, bare = (podman("run", "--rm", "--entrypoint", "sh", name, "-c", script) for name in (image, base))
    if found != bare:
        raise Failed(f"{image} bears what is the host's:\n{found}\nits base has:\n{bare}")
    told, before = (_told(podman, name) for name in (image, base))
    for word in ("EBBTIDE_TOKEN", "PIP_", "SSL_CERT", "_proxy"):
        if word in told and word not in before:
            raise Failed(f"{image} bears {word} in its settings or its history")
    if secrets := podman("run", "--rm", "--entrypoint", "find", image, "/secrets", "-type", "f").strip():
        raise Failed(f"{image} bears secrets: {secrets}")
    sizes = (int(podman("image", "inspect", "--format", "{{.Size}}", name)) for name in (image, base))
    whole, of_base = (size // _MIB for size in sizes)
    return f"{whole:,} MiB, {of_base:,} of them the base"


def _told(podman: Podman, image: str) -> str:
    return podman("history", "--no-trunc", "--format", "{{.CreatedBy}}", image) + podman("image", "inspect", image)
