"""`make test-compose`: docker-compose.yml, really run, by podman.

Builds the images, brings the CPU profile up, trains a short run that is submitted from outside, kills the worker's
container and the coordinator's process meanwhile, lets agents play another run's episodes while the gateway's process
is killed, checks what is promised of containers, images and the runs' books, and takes everything down. Each step is
printed with its seconds; when one fails, so are the logs' last lines.
"""

import argparse
import asyncio
import os
import secrets
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from ebbtide.cli.credentials import signing_keys
from ebbtide.client import Client
from ebbtide.errors import EbbtideError
from ebbtide.free_ports import free_port
from tests.compose import images, scene
from tests.compose.clients import CLIENT_ERRORS, GatewayClients, train_on_sessions
from tests.compose.podman import Failed, Podman, missing, say

_ROOT: Final = Path(".cache/compose")
_LOG: Final = Path("runs/compose-test.log")
_IMAGES: Final = "localhost/ebbtide-test"
_TAIL: Final = "25"


@contextmanager
def step(name: str) -> Iterator[None]:
    began = time.monotonic()
    say(f"{name} ...")
    yield
    say(f"{name}: {time.monotonic() - began:.0f} s")


def settings(folder: Path, coordinator: int, relay: int, gateway: int) -> dict[str, str]:
    """What docker-compose.yml is filled in with. The folder is this user's alone; its secrets, containers' too."""
    token, password = folder / "token", folder / "store-password"
    for secret in (token, password):
        secret.write_text(secrets.token_urlsafe(32))
        secret.chmod(0o644)
    return {
        "EBBTIDE_IMAGES": _IMAGES,
        "EBBTIDE_TOKEN_SOURCE": str(token),
        "EBBTIDE_STORE_PASSWORD_SOURCE": str(password),
        "EBBTIDE_TOKEN_KEYS_SOURCE": str(signing_keys.make(folder)),
        "EBBTIDE_PUBLISH_COORDINATOR": str(coordinator),
        "EBBTIDE_PUBLISH_RELAY": str(relay),
        "EBBTIDE_PUBLISH_GATEWAY": str(gateway),
    }


def build(podman: Podman, folder: Path, base: str) -> None:
    if not base:
        with step("base image"):
            base = images.base_image(podman)
    podman.fill(BASE_IMAGE=base, TORCH=os.environ.get("TORCH", "torch==2.13.0"))
    for service in images.SERVICES:
        with step(f"image of the {service}"):
            images.build(podman, service, folder)
    with step("images bear nothing of this host"):
        for name in ("redis", "control", "gateway", "trainer", "worker-cpu"):
            images.check_clean(podman, f"{_IMAGES}-{name}", base, folder)


async def play(podman: Podman, folder: Path, ports: list[int], steps: int) -> None:
    with step("up"):
        podman.compose("up", "--detach", "--no-build", timeout_s=300)
    with step("the base model is made"):
        if (status := podman("wait", podman.container("base-model"), timeout_s=900).strip()) != "0":
            raise Failed(f"base-model ended with status {status}")
    coordinator, relay, gateway = (f"127.0.0.1:{port}" for port in ports)
    token = (folder / "token").read_text()
    async with Client(coordinator, relay, token=token, patience_s=120) as client:
        with step("the worker attached"):
            await scene.workers_attached(client, 1)
        with step("health and rights of the containers"):
            scene.check_containers(podman)
        clients = GatewayClients(f"http://{gateway}", folder)
        with step("the run"):
            run = await scene.run_and_break(podman, client, clients, steps, lambda text: say(f"  {text}"))
        say(f"  {scene.check_books(run)}")
        with step("a run of agents, whose gateway is killed"):
            await train_on_sessions(client, clients, lambda: scene.crash(podman, "gateway"))


def end(podman: Podman) -> None:
    """A worker that is asked to end hands over and ends with status 0, within its grace."""
    with step("down"):
        podman.compose("stop", "worker", timeout_s=120)
        status = podman.inspect(podman.container("worker"))["State"]["ExitCode"]
        podman.compose("down", "--volumes", timeout_s=300)
    if status:
        raise Failed(f"the worker ended with status {status} when it was asked to")
    if left := podman.left():
        raise Failed(f"left behind: {left}")


def tails(podman: Podman) -> None:
    for name in podman("ps", "--all", "--format", "{{.Names}}", check=False).split():
        say(f"--- {name}")
        say(podman("logs", "--tail", _TAIL, name, check=False))


def clear(podman: Podman, *, keep: bool) -> None:
    with suppress(Failed):
        podman.compose("down", "--volumes", "--timeout", "2", timeout_s=300, check=False)
    with suppress(Failed):
        podman("rm", "--all", "--force", "--time", "1", check=False)
        podman("network", "prune", "--force", check=False)
    podman.close(keep=keep)


def main() -> int:
    parser = argparse.ArgumentParser(prog="make test-compose ARGS=...", description=__doc__)
    parser.add_argument("--keep", action="store_true", help="keep the images for the next time, in .cache/compose")
    parser.add_argument("--base", default="", help="base image, instead of a pulled or bootstrapped one")
    parser.add_argument("--steps", type=int, default=10, help="optimiser steps of the run")
    options = parser.parse_args()
    if lacking := list(missing()):
        say("What is missing:\n" + "\n".join(f"  {line}" for line in lacking))
        return 2
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # clears up as Ctrl-C does
    return _guarded(options)


def _guarded(options: argparse.Namespace) -> int:
    _LOG.parent.mkdir(exist_ok=True)
    _LOG.write_text("")
    began, ports = time.monotonic(), [free_port(), free_port(), free_port()]
    with tempfile.TemporaryDirectory(prefix="ebbtide-compose-") as name:
        folder = Path(name)
        podman = Podman(_ROOT.absolute(), f"ebbtide-test-{os.getpid()}", settings(folder, *ports), _LOG.absolute())
        try:
            work: list[Callable[[], None]] = [
                lambda: build(podman, folder, options.base),
                lambda: asyncio.run(play(podman, folder, ports, options.steps)),
                lambda: end(podman),
            ]
            for part in work:
                part()
        except (Failed, TimeoutError, EbbtideError, *CLIENT_ERRORS) as error:
            tails(podman)
            say(f"FAILED after {time.monotonic() - began:.0f} s: {error}")
            return 1
        except KeyboardInterrupt:
            return 130
        finally:
            clear(podman, keep=options.keep)
    say(f"All is well, and all is gone, in {time.monotonic() - began:.0f} s. What podman said: {_LOG}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
