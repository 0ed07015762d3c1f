"""A cluster to do violence to: Redis and every service its own process, killed, frozen and ended by process id.

All of it lies in one directory and listens on the loopback or a unix socket, on ports of the kernel's choice. A service
started again under its name listens where it did.
"""

import asyncio
import json
import os
import signal
import sys
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

from ebbtide.auth.security import ClientSecurity
from ebbtide.client import Client
from ebbtide.ledger import AttemptRecord, read_ledger
from ebbtide.local_cluster.launcher import Program, ProgramProcess
from ebbtide.store.scripts import LEADER
from tests.fakes.links import Way
from tests.fakes.scripted_settings import ScriptedSettings, engine_settings, former_settings
from tests.support.redis_servers import EmbeddedRedis
from tests.support.waiting import wait_until

TOKEN: Final = "a-token-of-tests"
#: The flush window of all workers.
FLUSH_TOKENS: Final = 8
#: What all workers follow. Tokens come slowly, and are sent often, so that a flush window has room for an append that a
#: busy machine takes its time for.
SCRIPT: Final = ScriptedSettings(step_s=0.025, vocab_size=100, mean_length=96)

_ENVIRONMENT: Final = {
    "EBBTIDE_TOKEN": TOKEN,
    "PYTHONPATH": os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), str(Path(__file__).parents[2])]),
}
_COORDINATOR: Final = {"heartbeat_s": 0.5, "heartbeat_timeout_s": 15, "lease_ttl_s": 3}
_WORKER: Final = {
    "slots": 32,
    "flush_tokens": FLUSH_TOKENS,
    "flush_interval_ms": 40,
    "mirror_dir": "",  # as if each were on a host of its own: what one fetches, another does not find
}


class Cluster:
    """`process[name]` is the last one started under that name; workers are called w1, w2, ...

    A `routed` one has a way between any two programs, `ways[who calls, who is called]`, once the caller was started.
    """

    def __init__(self, directory: Path, *, routed: bool = False) -> None:
        self.directory = directory
        self.redis = EmbeddedRedis(directory / "redis", tied=True)  # a killed benchmark leaves none behind
        self.process: dict[str, ProgramProcess] = {}
        self.heads = ["coordinator"]  # the coordinators that workers and clients know
        self.routed = routed
        self.ways: dict[tuple[str, str], Way] = {}
        self.environment: dict[str, dict[str, str]] = {}  # of programs, by name, beyond that of all
        # Of workers that are started from now on:
        self.script = SCRIPT
        self.worker_settings: dict[str, Any] = {}
        self.patience_s = 60.0  # of clients that are made from now on
        self._coordinator: dict[str, Any] = dict(_COORDINATOR)
        self._clients: list[Client] = []

    async def boot(self, *, workers: int = 2, **coordinator: Any) -> Client:
        """Start everything, and return a client of it. The coordinator keeps its settings when it is started again."""
        self._coordinator |= coordinator
        self.store()
        await self.coordinator()
        await self.relay()
        await asyncio.gather(*(self.worker(f"w{number + 1}") for number in range(workers)))
        return self.client()

    async def boot_pair(self, *, workers: int = 2, **coordinator: Any) -> Client:
        """Like `boot`, with two coordinators, `coordinator` and `standby`, of which the first leads."""
        self._coordinator |= {"standby": True, **coordinator}
        self.heads = ["coordinator", "standby"]
        self.store()
        await asyncio.gather(self.coordinator(), self.relay())
        await wait_until(self.leader, timeout=30, what="a leader")
        await self.coordinator("standby")
        await asyncio.gather(*(self.worker(f"w{number + 1}") for number in range(workers)))
        return self.client(*self.heads)

    def leader(self) -> str:
        """Which of the coordinators holds the lease; empty if none does."""
        address = self.redis.command("GET", LEADER).decode().partition(" ")[2].strip()
        return next((name for name in self.heads if address and self._address(name) == address), "")

    def store(self) -> None:
        """Start Redis, again if need be."""
        with patch.dict(os.environ, self.environment.get("redis", {})):
            self.redis.start()

    def client(self, *coordinators: str, relay: str = "") -> Client:
        security = ClientSecurity(token=TOKEN)
        heads = ",".join(self.process[name].address for name in coordinators or ("coordinator",))
        addresses = heads, relay or self.process["relay"].address
        client = Client(*addresses, security=security, patience_s=self.patience_s)
        self._clients.append(client)
        return client

    async def coordinator(self, name: str = "coordinator", **settings: Any) -> ProgramProcess:
        listen, store = self._address(name), await self.route(name, "redis")
        flags = {"server_listen": listen, "store_url": store, **self._coordinator, **settings}
        return await self.start(name, "coordinator", **flags)

    async def relay(self, **settings: Any) -> ProgramProcess:
        data = self.directory / "relay"
        flags: dict[str, Any] = {"server_listen": self._address("relay"), "data_dir": data}
        if "coordinator" in self.process:
            flags["coordinator"] = self.process["coordinator"].address
        return await self.start("relay", "weight_relay", **flags, **settings)

    async def worker(
        self, name: str, *coordinators: str, script: ScriptedSettings | None = None, **settings: Any
    ) -> ProgramProcess:
        """Start one whose engine follows `script`, if `settings` name no other engine."""
        flags: dict[str, Any] = {
            "coordinator": ",".join([await self.route(name, head) for head in coordinators or self.heads]),
            "relay": await self.route(name, "relay"),
            "worker_id": name,
            "counter_file": self.directory / f"{name}.ledger",
        }
        if "engine" not in settings:
            told = former_settings if self._is_former(name) else engine_settings
            flags |= told(script or self.script)
        return await self.start(name, "rollout_worker", **{**flags, **_WORKER, **self.worker_settings, **settings})

    def _is_former(self, name: str) -> bool:
        """Whether this worker's code is of a revision that had the scripted engine among its own."""
        roots = self.environment.get(name, {}).get("PYTHONPATH", "").split(os.pathsep)
        found = (Path(root) / "ebbtide/rollout_worker/settings.py" for root in roots)
        return any(path.exists() and "ScriptedSettings" in path.read_text() for path in found)

    async def start(self, name: str, module: str, /, *, boot_s: float = 60.0, **settings: Any) -> ProgramProcess:
        """Start a service and wait until it is ready."""
        flags = {"die_with_parent": os.getpid(), "ready_file": self.directory / f"{name}.json", **settings}
        command = [
            sys.executable,
            "-m",
            module if module.startswith(("tests.", "benchmarks.")) else f"ebbtide.{module}",
        ]
        for flag, value in flags.items():
            command += [f"--{flag.replace('_', '-')}", *([] if value is True else [str(value)])]
        program = Program(
            name=name,
            command=tuple(command),
            environment={**os.environ, **_ENVIRONMENT, **self.environment.get(name, {})},
            log=self.directory / f"{name}.log",
            ready_file=self.directory / f"{name}.json",
            boot_s=boot_s,
            stop_s=30.0,
        )
        process = self.process[name] = ProgramProcess(program)
        await process.wait_ready()
        return process

    async def route(self, caller: str, service: str) -> str:
        """The address under which `caller` reaches `service`."""
        target = self.redis.url if service == "redis" else self.process[service].address
        if not self.routed:
            return target
        if (caller, service) not in self.ways:
            self.ways[caller, service] = await Way.open(target)
        return self.ways[caller, service].address

    def _address(self, name: str) -> str:
        """Where `name` listened before, or anywhere."""
        return self.process[name].address if name in self.process else "127.0.0.1:0"

    def kill(self, *names: str) -> None:
        for name in names:
            if name == "redis":
                self.redis.kill()
            else:
                self.process[name].kill()

    def freeze(self, name: str) -> None:
        os.kill(self.pid(name), signal.SIGSTOP)

    def thaw(self, name: str) -> None:
        os.kill(self.pid(name), signal.SIGCONT)

    def ask_to_end(self, name: str) -> None:
        os.kill(self.pid(name), signal.SIGTERM)

    def pid(self, name: str) -> int:
        return self.redis.pid if name == "redis" else self.process[name].pid

    def ledger(self, *names: str) -> list[AttemptRecord]:
        """What these workers, or all that ever were, generated, as they counted it themselves."""
        paths: Iterable[Path] = self.directory.glob("*.ledger")
        if names:
            paths = (self.directory / f"{name}.ledger" for name in names)
        return [record for path in paths for record in read_ledger(path)]

    def generated(self) -> int:
        """Tokens that left the engines so far."""
        return sum(record.generated for record in self.ledger())

    def logged(self, name: str, event: str) -> list[dict[str, Any]]:
        """The entries about `event` in the log of all that ran under `name`."""
        lines = (self.directory / f"{name}.log").read_text().splitlines()
        entries = [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]
        return [entry for entry in entries if entry.get("event") == event]

    def installed(self, worker: str) -> list[tuple[float, int]]:
        """When this worker had which version, by the wall clock."""
        entries = self.logged(worker, "installed")
        return [(datetime.fromisoformat(entry["timestamp"]).timestamp(), entry["version"]) for entry in entries]

    async def close(self) -> None:
        for client in self._clients:
            await client.close()
        for process in self.process.values():
            process.kill()
        for way in self.ways.values():
            await way.close()
        self.redis.close()
