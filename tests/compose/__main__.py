"""`make test-compose`: docker-compose.yml, really run, by podman, from a fresh clone without preparation.

Builds the image, brings the plain file up and trains the example, submitted by the command line's container, while a
worker's container and the processes of coordinator and relay are killed. Agents play another run's episodes while the
gateway's process is killed. A third run is submitted by a program that has Ebbtide from a wheel alone, and goes on
behind `down` and `up`. Then the profile coserving: a worker borrows from a served model under traffic, and the guard is
killed. Each step is printed with its seconds; when one fails, so are the logs' last lines. In the end all is removed.
Behind the image's build it may take 15 minutes.
"""

import argparse
import asyncio
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from ebbtide.client import Client
from ebbtide.free_ports import free_port
from tests.compose import coserving, images, scene
from tests.compose.clients import GatewayClients, healthy, train_on_sessions
from tests.compose.podman import Failed, Podman, missing, say
from tests.compose.wheel import WheelUser
from tests.support.waiting import wait_until

_ROOT: Final = Path(".cache/compose")
_LOG: Final = Path("runs/compose-test.log")
_IMAGE: Final = "localhost/ebbtide-test"
_TAIL: Final = "25"
_PORTS: Final = ("COORDINATOR", "RELAY", "GATEWAY", "GUARD")
PARTS: Final = ("plain", "wheel", "coserving")
_SETUP_S: Final = 900.0
_BOOT_S: Final = 600.0
#: For everything after the image was built.
_WITHIN_S: Final = 900.0


@contextmanager
def step(name: str) -> Iterator[None]:
    began = time.monotonic()
    say(f"{name} ...")
    yield
    say(f"{name}: {time.monotonic() - began:.0f} s")


def tell(text: str) -> None:
    say(f"  {text}")


class ComposeTest:
    """`folder` is this user's alone. In it is a clone of this checkout, as of its last commit."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.ports = folder, {name: free_port() for name in _PORTS}
        self._clone = folder / "clone"
        settings = {f"EBBTIDE_PUBLISH_{name}": str(port) for name, port in self.ports.items()}
        settings["EBBTIDE_IMAGE"] = _IMAGE
        name = f"ebbtide-test-{os.getpid()}"
        self.podman = Podman(_ROOT.absolute(), name, self._clone, settings, _LOG.absolute())
        self.user = WheelUser(folder / "user", self._clone)

    def clone(self) -> None:
        with step("a fresh clone"):
            command = ["git", "clone", "--quiet", "--no-hardlinks", str(Path.cwd()), str(self._clone)]
            subprocess.run(command, check=True, capture_output=True)

    def build(self, base: str) -> None:
        podman = self.podman
        if not base:
            with step("base image"):
                base = images.base_image(podman)
        podman.fill(BASE_IMAGE=base, TORCH=os.environ.get("TORCH", "torch==2.13.0"))
        with step("image"):
            images.build(podman, self.folder)
        with step("the image bears nothing of this host"):
            tell(images.check_clean(podman, _IMAGE, base, self.folder))

    async def play(self, parts: Sequence[str]) -> None:
        podman = self.podman
        with step("up, with secrets and a base model from nothing"):
            podman.up()
            if (status := podman("wait", podman.container("setup"), timeout_s=_SETUP_S).strip()) != "0":
                raise Failed(f"setup ended with status {status}")
            self._fetch_secrets()
        addresses = [f"127.0.0.1:{self.ports[name]}" for name in ("COORDINATOR", "RELAY")]
        token = (self.folder / "token").read_text()
        self.user.know(EBBTIDE_COORDINATOR=addresses[0], EBBTIDE_RELAY=addresses[1], EBBTIDE_TOKEN=token)
        async with Client(*addresses, token=token, patience_s=300) as client:
            with step("two workers attached"):
                await scene.workers_attached(client, 2)
            for name, part in (("plain", self._plain), ("wheel", self._wheel), ("coserving", self._coserving)):
                if name in parts:
                    await part(client)

    async def _plain(self, client: Client) -> None:
        podman, clients = self.podman, GatewayClients(f"http://127.0.0.1:{self.ports['GATEWAY']}", self.folder)
        with step("health and rights of the containers"):
            scene.check_containers(podman, scene.PLAIN)
        with step("a run, and kills of worker, coordinator and relay"):
            tell(scene.check_books(await scene.run_and_break(podman, client, clients, tell), ended=1))
        with step("a run of agents, whose gateway is killed"):
            await train_on_sessions(client, clients, lambda: scene.crash(podman, "gateway"))

    async def _wheel(self, client: Client) -> None:
        with step("a wheel, in a fresh environment"):
            self.user.install()
        with step("a run from the wheel, down in the middle of it and up again"):
            run = await scene.go_on_after_down(self.podman, client, self.user, tell)
            tell(scene.check_books(run, ended=2, resumed=False))
            scene.cancel_from_wheel(self.user, run.run_id, tell)

    async def _coserving(self, client: Client) -> None:
        podman = self.podman
        with step("workers that are asked to end do, within their grace"):
            self._stop("worker-1", "worker-2")
        with step("up with the profile coserving"):
            podman.up(*coserving.LENDING, profiles=coserving.PROFILE)
            await wait_until(self._guarding, _BOOT_S, interval=0.5, what="the guard says that its engine answers")
            podman.up("traffic", profiles=coserving.PROFILE)
        with step("a run on borrowed time, whose guard is killed under traffic"):
            tell(scene.check_books(await coserving.borrow(podman, client, tell), ended=1, resumed=False))

    def end(self) -> None:
        with step("down"):
            self.podman.compose("down", "--volumes", profiles=(*coserving.PROFILE, "cli"), timeout_s=300)
        if left := self.podman.left():
            raise Failed(f"left behind: {left}")

    def _fetch_secrets(self) -> None:
        """What users of the gateway and of the coordinator are given."""
        for name, kept in (("token", "token"), ("token-keys", "tokens.key"), ("token-keys", "tokens.pub")):
            volume = f"{self.podman.project}_{name}"
            where = self.podman("volume", "inspect", "--format", "{{.Mountpoint}}", volume).strip()
            shutil.copy(Path(where) / kept, self.folder / kept)

    def _stop(self, *workers: str) -> None:
        self.podman.compose("stop", *workers, timeout_s=120)
        for worker in workers:
            if status := self.podman.inspect(self.podman.container(worker))["State"]["ExitCode"]:
                raise Failed(f"{worker} ended with status {status} when it was asked to")

    async def _guarding(self) -> bool:
        return await healthy(f"http://127.0.0.1:{self.ports['GUARD']}/ebbtide")


def tails(podman: Podman) -> None:
    for name in podman("ps", "--all", "--format", "{{.Names}}", check=False).split():
        say(f"--- {name}")
        say(podman.logs(name, "--tail", _TAIL))


def clear(podman: Podman, *, keep: bool) -> None:
    with suppress(Failed, OSError):
        podman("rm", "--all", "--depend", "--force", "--time", "1", timeout_s=300, check=False)
        podman("volume", "prune", "--force", check=False)
        podman("network", "prune", "--force", check=False)
    podman.close(keep=keep)


def main() -> int:
    parser = argparse.ArgumentParser(prog="make test-compose ARGS=...", description=__doc__)
    parser.add_argument("--keep", action="store_true", help="keep the image for the next time, in .cache/compose")
    parser.add_argument("--base", default="", help="base image, instead of a pulled or bootstrapped one")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="run these alone")
    options = parser.parse_args()
    if lacking := list(missing()):
        say("What is missing:\n" + "\n".join(f"  {line}" for line in lacking))
        return 2
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # clears up as Ctrl-C does
    return _guarded(options)


def _guarded(options: argparse.Namespace) -> int:
    _LOG.parent.mkdir(exist_ok=True)
    _LOG.write_text("")
    with tempfile.TemporaryDirectory(prefix="ebbtide-compose-") as name:
        test, built = ComposeTest(Path(name)), time.monotonic()
        try:
            test.clone()
            test.build(options.base)
            built = time.monotonic()
            asyncio.run(test.play(options.parts))
            test.end()
        except KeyboardInterrupt:
            return 130
        except Exception as error:  # noqa: BLE001 - whatever it is, the containers' last words are shown before they go
            with suppress(Failed):
                tails(test.podman)
            say("".join(traceback.format_exception(error)))
            say(f"FAILED {time.monotonic() - built:.0f} s after the image was built: {error}")
            return 1
        finally:
            clear(test.podman, keep=options.keep)
    say(f"What podman said: {_LOG}")
    return judged(time.monotonic() - built)


def judged(took_s: float) -> int:
    """The exit status of a test in which nothing else went wrong."""
    took = f"It took {took_s:.0f} s after the image was built"
    if took_s > _WITHIN_S:
        say(f"FAILED: it is too slow. {took}, and may take {_WITHIN_S:.0f}. All else is well, and all is gone.")
        return 1
    say(f"All is well, and all is gone. {took}, of the {_WITHIN_S:.0f} that it may take.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
