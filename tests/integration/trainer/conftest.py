"""A whole cluster with scripted engines, each program its own process."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import msgspec
import pytest

from ebbtide.auth.security import ClientSecurity
from ebbtide.client import Client
from ebbtide.driver.host_process import HostProcess, IsolationRefused, host_plan
from ebbtide.driver.settings import DriverSettings
from ebbtide.free_ports import free_port
from ebbtide.types.run import RunSpec
from tests.fakes.scripted_settings import ScriptedSettings, engine_flags
from tests.support.redis_servers import EmbeddedRedis
from tests.support.waiting import wait_until

TOKEN = "a-token-of-tests"
ENVIRONMENT = "environments_for_tests:make_source"
ALLOWED = "environments_for_tests:*,nowhere:*,reasoning_gym"
#: Ends a scripted response.
SCRIPTED_END = 1


class Program:
    """One program as its own process; started again, it listens where it did. `runner`: what Python starts it by."""

    runner: tuple[str, ...] = ("-m",)

    def __init__(self, module: str, directory: Path, *flags: str, listens: bool = False) -> None:
        self._module, self.flags, self._listens = module, flags, listens
        self._ready = directory / f"{module}.json"
        self._log = directory / f"{module}.log"
        self.process: subprocess.Popen[bytes] | None = None
        self.address = "127.0.0.1:0"

    def start(self) -> None:
        self.launch()
        self.wait()

    def launch(self) -> None:
        self._ready.unlink(missing_ok=True)
        command = [sys.executable, *self.runner, f"ebbtide.{self._module}"]
        command += [*self.flags, "--ready-file", str(self._ready)]
        command += ["--server-listen", self.address] if self._listens else []
        path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, "EBBTIDE_TOKEN": TOKEN, "PYTHONPATH": path}
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=log)

    def wait(self) -> None:
        """Until it is ready."""
        asyncio.run(wait_until(self._ready.exists, timeout=60, what=self._module))
        self.address = json.loads(self._ready.read_text())["address"]

    def end(self, how: signal.Signals = signal.SIGTERM) -> int | None:
        if self.process is None:
            return None
        if self.process.poll() is None:
            self.process.send_signal(how)
        return self.process.wait(30)

    def log(self) -> str:
        return self._log.read_text()


class Cluster:
    """Four programs, and a worker with a scripted engine. `trainer`: more flags of the trainer's; `trainer_runner`:
    what Python starts it by."""

    def __init__(
        self,
        directory: Path,
        redis_url: str,
        trainer: tuple[str, ...] = (),
        trainer_runner: tuple[str, ...] = Program.runner,
    ) -> None:
        self.directory, self._trainer, self._runner = directory, trainer, trainer_runner
        self.coordinator = Program(
            "coordinator",
            directory,
            *("--store-url", redis_url, "--lease-ttl-s", "2", "--recover-grace-s", "1"),
            listens=True,
        )
        self.relay = Program("weight_relay", directory, "--data-dir", str(directory / "relay"), listens=True)
        self.programs: dict[str, Program] = {}
        self.metrics_port = free_port()  # of the trainer

    def start(self, model: Path) -> None:
        self.coordinator.start()
        self.relay.start()
        where = ("--coordinator", self.coordinator.address, "--relay", self.relay.address)
        script = ScriptedSettings(vocab_size=100, step_s=0.002, mean_length=12)
        worker = ("--model", str(model), "--slots", "64", *engine_flags(script))
        cpu = ("--threads", "1", "--device", "cpu", "--metrics-port", str(self.metrics_port))
        runs = (*where, "--environments-allowed", ALLOWED, "--output-roots", "/")
        self.programs = {
            "worker": Program("rollout_worker", self.directory, *where, *worker),
            "trainer": Program("trainer", self.directory, *runs, *cpu, "--holder", "trainer", *self._trainer),
            "driver": Program("driver", self.directory, *runs, *_trust(), "--holder", "driver"),
        }
        self.programs["trainer"].runner = self._runner
        for program in self.programs.values():
            program.launch()
        for program in self.programs.values():
            program.wait()
        self.programs["coordinator"] = self.coordinator

    def connect(self) -> Client:
        security = ClientSecurity(token=TOKEN)
        return Client(self.coordinator.address, self.relay.address, security=security, patience_s=30.0)

    def streamed_groups(self) -> float:
        """Groups whose gradients the trainer has added since it was started."""
        with urlopen(f"http://127.0.0.1:{self.metrics_port}/metrics", timeout=10) as page:
            lines = page.read().decode().splitlines()
        return sum(float(line.split()[1]) for line in lines if line.startswith("ebbtide_trainer_streamed_groups_total"))

    async def restart(self, name: str, how: signal.Signals) -> int | None:
        """End a program, start it again, and return what it ended with."""
        status = await asyncio.to_thread(self.programs[name].end, how)
        await asyncio.to_thread(self.programs[name].start)
        return status

    def close(self) -> None:
        for name in ("driver", "trainer", "worker", "coordinator"):
            if name in self.programs:
                self.programs[name].end()
        self.relay.end()
        self.coordinator.end()


def _trust() -> tuple[str, ...]:
    """Runs environments isolated, unless this host does not allow it."""

    async def isolate() -> None:
        settings = DriverSettings()
        await (await HostProcess.start(settings, host_plan(settings))).end()

    try:
        asyncio.run(isolate())
    except IsolationRefused:
        return ("--environments-trust",)
    return ()


@pytest.fixture(scope="module")
def cluster(
    tmp_path_factory: pytest.TempPathFactory, redis_server: EmbeddedRedis, tiny_model: Path
) -> Iterator[Cluster]:
    """One for all tests of a module, as torch takes its time to start."""
    assert redis_server.command("FLUSHALL") == b"+OK\r\n"
    cluster = Cluster(tmp_path_factory.mktemp("cluster"), redis_server.url)
    try:
        cluster.start(tiny_model)
        yield cluster
    finally:
        cluster.close()


@pytest.fixture
async def client(cluster: Cluster) -> AsyncIterator[Client]:
    async with cluster.connect() as client:
        yield client


@pytest.fixture
def make_spec(tmp_path: Path, tiny_model: Path) -> Callable[..., RunSpec]:
    def make(**changes: Any) -> RunSpec:
        base: dict[str, Any] = {
            "name": "run",
            "model": str(tiny_model),
            "output": str(tmp_path / "output"),
            "environment": {"name": ENVIRONMENT},
            "sampling": {"max_tokens": 40, "stop_token_ids": [SCRIPTED_END]},
            "batch": {"groups_per_step": 4, "group_size": 4},
            "trainer": {"steps": 6, "learning_rate": 1e-2, "checkpoint_every": 2},
            "evaluation": {"problems": 10, "every": 3},
        }
        for name, value in changes.items():
            base[name] = {**base.get(name, {}), **value} if isinstance(value, dict) else value
        return msgspec.convert(base, RunSpec)

    return make
