"""The whole system, each service on a host of its own:

    control    redis and the coordinator
    relay      the weight-relay
    trainer    the trainer and the episode driver
    a, b       a rollout-worker each, the one of b behind a long line that loses packets
    gateway    a gateway, which a test starts if it has clients for it
    serving    an engine that serves users, its guard and a worker that borrows, which a test starts too
    user       who submits runs, by the SDK

Invariant: every process is in `process`, or is Redis, or one that `ask` waits for; `close` ends them by their ids.
"""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

from ebbtide.ledger import AttemptRecord, read_ledger
from ebbtide.local_cluster.launcher import Program, ProgramProcess
from tests.fakes.scripted_settings import ScriptedSettings, engine_settings
from tests.hosts.identities import Identities
from tests.hosts.network import Network
from tests.support.redis_servers import EmbeddedRedis

ROOT: Final = Path(__file__).parents[2]
#: The flush window of all workers.
FLUSH_TOKENS: Final = 8
COORDINATOR_PORT, RELAY_PORT, GATEWAY_PORT, GUARD_PORT, _ENGINE_PORT = 7600, 7610, 7640, 8100, 8000
#: A worker that is silent for so long is lost. Long enough for a busy machine, and less than a cut.
HEARTBEAT_TIMEOUT_S: Final = 6.0
HOSTS: Final = ("control", "relay", "trainer", "a", "b", "gateway", "serving", "user")
#: From one coast to the other, on a line that is none of the best.
LATENCY_S, LOSS = 0.02, 0.005
#: Of the relay's host.
_RELAY_BITS_PER_S: Final = 200_000_000
_PAIR: Final = {"cert": "pem", "key": "key"}
_WORKER: Final = {"slots": 32, "flush_tokens": FLUSH_TOKENS, "flush_interval_ms": 40}
SCRIPT: Final = ScriptedSettings(step_s=0.025, vocab_size=100, mean_length=96)
SCRIPTED: Final = engine_settings(SCRIPT)
#: No setting of the machine's user is for these, but what their Python needs.
_INHERITED: Final = {name: value for name, value in os.environ.items() if not name.startswith("EBBTIDE_")}


class _Redis(EmbeddedRedis):
    def __init__(self, directory: Path, network: Network) -> None:
        super().__init__(directory)
        self._network = network

    def _command_line(self) -> list[str]:
        return list(self._network.on("control", *super()._command_line()))


class Cluster:
    """Nothing runs before `boot`. `network` is empty yet."""

    def __init__(self, directory: Path, network: Network) -> None:
        self.directory, self.network = directory, network
        self.process: dict[str, ProgramProcess] = {}
        for host in HOSTS:
            network.host(host, **({"latency_s": LATENCY_S, "loss": LOSS} if host == "b" else {}))
        network.limit("relay", _RELAY_BITS_PER_S)
        self.identities = Identities(directory / "identities", {host: network.address(host) for host in HOSTS})
        self.redis = _Redis(directory / "redis", network)
        self.coordinator = f"{network.address('control')}:{COORDINATOR_PORT}"
        self.relay = f"{network.address('relay')}:{RELAY_PORT}"
        self.gateway = f"{network.address('gateway')}:{GATEWAY_PORT}"

    async def boot(self, **worker: Any) -> None:
        """Start everything; `worker`: settings of both workers."""
        await self.boot_services()
        await asyncio.gather(self.trainer(), self.driver(), *(self.worker(host, **worker) for host in "ab"))

    async def boot_services(self) -> None:
        """Redis, the coordinator and the relay."""
        self.redis.start()
        await asyncio.gather(self._coordinator(), self._relay())

    async def _coordinator(self) -> None:
        await self.start(
            "coordinator",
            "control",
            "ebbtide.coordinator",
            server_listen=self.coordinator,
            store_url=self.redis.url,
            heartbeat_s=0.5,
            heartbeat_timeout_s=HEARTBEAT_TIMEOUT_S,
            lease_ttl_s=5,
        )

    async def _relay(self) -> None:
        data = self.directory / "relay"
        await self.start("relay", "relay", "ebbtide.weight_relay", server_listen=self.relay, data_dir=data)

    async def trainer(self) -> None:
        settings: dict[str, Any] = {"holder": "trainer", "threads": 1, "device": "cpu", "keep_checkpoints": 99}
        await self.start("trainer", "trainer", "ebbtide.trainer", **settings)

    async def driver(self) -> None:
        await self.start("driver", "trainer", "ebbtide.driver", holder="driver")

    async def serve_clients(self) -> None:
        """Start the gateway. Its clients see the certificate that it has for the coordinator."""
        folder = self.identities.folder
        files: dict[str, Any] = {f"door_tls_{name}": folder / f"gateway.{end}" for name, end in _PAIR.items()}
        await self.start("gateway", "gateway", "ebbtide.gateway", listen=self.gateway, **files)

    async def serve_users(self, **worker: Any) -> None:
        """Start an engine that serves users, its guard, and a worker that borrows."""
        await self.start("engine", "serving", "tests.hosts.engine", identity="", port=_ENGINE_PORT)
        await self.guard()
        await self.worker("serving", kind="borrowed", grant_dir=self.grants, **worker)

    async def guard(self) -> None:
        """It has no identity: it calls nobody, and only its host's users and workers call it."""
        listen, upstream = f"127.0.0.1:{GUARD_PORT}", f"http://127.0.0.1:{_ENGINE_PORT}"
        settings: dict[str, Any] = {"listen": listen, "upstream": upstream, "grant_dir": self.grants}
        await self.start("guard", "serving", "ebbtide.serving_guard", identity="", **settings)

    @property
    def grants(self) -> Path:
        return self.directory / "grants"

    async def worker(self, host: str, **settings: Any) -> None:
        # Without a mirror in shared memory, which hosts do not share.
        flags = {"worker_id": host, "counter_file": self.directory / f"{host}.ledger", "mirror_dir": ""}
        await self.start(host, host, "ebbtide.rollout_worker", **{**flags, **_WORKER, **settings})

    async def start(self, name: str, host: str, module: str, *, identity: str | None = None, **settings: Any) -> None:
        """Start a program on a host and wait until it is ready. `identity`: other than its name; empty: none."""
        ready = self.directory / f"{name}.json"
        program = Program(
            name=name,
            command=self.network.on(host, sys.executable, "-m", module, *_flags({"ready_file": ready, **settings})),
            environment=self.environment(name if identity is None else identity),
            log=self.directory / f"{name}.log",
            ready_file=ready,
            boot_s=180.0,
            stop_s=40.0,
        )
        process = self.process[name] = ProgramProcess(program)
        await process.wait_ready()

    def environment(self, name: str) -> dict[str, str]:
        """What a program is told by its environment: where the others are, and who it is. One of no name: nothing."""
        if not name:
            return {**_INHERITED, "PYTHONPATH": str(ROOT)}
        paths = {"PYTHONPATH": str(ROOT), "EBBTIDE_COORDINATOR": self.coordinator, "EBBTIDE_RELAY": self.relay}
        paths["EBBTIDE_OUTPUT_ROOTS"] = str(self.directory)
        return {**_INHERITED, "OMP_WAIT_POLICY": "PASSIVE", **paths, **self.identities.environment(name)}

    async def ask(
        self, host: str, *command: str, identity: str, **environment: str
    ) -> "subprocess.CompletedProcess[str]":
        """Run a Python program on a host, as one that has the identity of `identity`, to its end."""
        return await asyncio.to_thread(
            subprocess.run,
            self.network.on(host, sys.executable, *command),
            cwd=self.directory,  # where a program would leave what it leaves
            env=self.environment(identity) | environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )

    def ledger(self, *hosts: str) -> list[AttemptRecord]:
        """What the workers of these hosts, or of all, generated, as they counted it themselves."""
        there = [self.directory / f"{host}.ledger" for host in hosts or ("a", "b", "serving")]
        return [record for path in there if path.exists() for record in read_ledger(path)]

    def logged(self, name: str, *words: str) -> list[dict[str, Any]]:
        """The entries whose event contains one of `words` in the log of `name`."""
        lines = (self.directory / f"{name}.log").read_text().splitlines()
        entries = [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]
        return [entry for entry in entries if any(word in str(entry.get("event")) for word in words)]

    def close(self) -> None:
        for process in self.process.values():
            process.kill()
        self.redis.close()


def _flags(settings: dict[str, Any]) -> list[str]:
    words: list[str] = []
    for name, value in {"die_with_parent": os.getpid(), **settings}.items():
        words += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    return words
