"""The programs of the benchmark: Redis, a coordinator and its standby, both measured, workers' processes, and runs of
several users.
"""

import asyncio
import json
import os
import re
import shutil
import signal
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, TypeVar

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from benchmarks.control_plane.driver import Driver
from benchmarks.control_plane.house import ROOT, House, code_of, order
from benchmarks.control_plane.measures import cpu_s
from benchmarks.scale.loop_probe import ask
from ebbtide.auth.role_tokens import mint
from ebbtide.auth.roles import Role
from ebbtide.store.scripts import TERM

D = TypeVar("D", bound=Driver)
_TOKEN_S: Final = 86400.0
_COORDINATORS: Final = ("coordinator", "standby")
#: A third of the default: the load itself takes most of two cores.
_FLUSHES_PER_S: Final = 350.0
#: How often the store is asked whose term it is: a lease lasts for two seconds.
_LOOK_S: Final = 0.1
#: What a coordinator warns of when the fleet's lease was over before it was renewed.
_LAPSED: Final = "the lease could not be renewed in time"


class Town(House):
    """`checkout`: of the coordinators' code; None: this one. `fleets`: workers' processes. `logs`: a folder that the
    coordinators' logs are copied to at the end. A coordinator that ends is started again, as a standby.
    """

    def __init__(self, *, fleets: int, users: int, checkout: Path | None = None, logs: Path | None = None) -> None:
        super().__init__()
        self._count, self._users, self._checkout, self._logs = fleets, users, checkout, logs
        self._key = Ed25519PrivateKey.generate()
        self._pids: dict[str, int] = {}
        self._addresses = dict.fromkeys(_COORDINATORS, "127.0.0.1:0")
        self.leader = _COORDINATORS[0]
        self.fleets: list[asyncio.subprocess.Process] = []

    async def _start(self) -> None:
        self._stack.enter_context(self.redis)
        self._stack.callback(self._keep_logs)
        self._cpu = (0.0, 0.0)
        keys = self.redis.directory / "tokens.pub"
        keys.write_bytes(self._key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
        for name in _COORDINATORS:
            await self._begin(name, standby=name != self.leader)
        self.address = ",".join(self._addresses.values())
        for number in range(self._count):
            self.fleets.append(await self._fleet_of("benchmarks.scale.fleet", f"p{number}"))

    async def _begin(self, name: str, *, standby: bool) -> None:
        self._addresses[name], self._pids[name] = await self._coordinator(
            name,
            *("--server-token-keys", str(self.redis.directory / "tokens.pub"), *(["--standby"] if standby else [])),
            *("--flushes-per-s", str(_FLUSHES_PER_S)),
            module="benchmarks.scale.probed_coordinator",
            listen=self._addresses[name],
            EBBTIDE_PROBE=str(self._socket(name)),
            **code_of(self._checkout or ROOT),
        )
        self.coordinator = self._pids[self.leader]

    def _keep_logs(self) -> None:
        if self._logs is not None:
            self._logs.mkdir(parents=True, exist_ok=True)
            for name in _COORDINATORS:
                shutil.copy(self.redis.directory / f"{name}.log", self._logs)

    def _socket(self, name: str) -> Path:
        return self.redis.directory / f"{name}.probe"

    @property
    def _other(self) -> str:
        return next(name for name in _COORDINATORS if name != self.leader)

    async def mend(self) -> int:
        """Start coordinators that ended again. Returns how many had ended; if the leader had, the other one leads."""
        ended = [name for name, pid in self._pids.items() if not _lives(pid)]
        if self.leader in ended:
            self.leader = self._other
        for name in ended:
            self._socket(name).unlink(missing_ok=True)
            await self._begin(name, standby=True)
        return len(ended)

    def driver(self, number: int, *, lengths: tuple[int, int], kind: type[D]) -> D:
        """The trainer of a run, of its kind; users take turns."""
        user = f"user{number % self._users}"
        token = mint(self._key, Role.TRAINER, ttl_s=_TOKEN_S, name=user)
        return kind(self.address, token, run_id=f"{user}.{number}", lengths=lengths)

    async def everywhere(self, do: str, **more: Any) -> list[dict[str, Any]]:
        """Give all workers' processes an order at the same time; their answers."""
        return await asyncio.gather(*(order(process, do, **more) for process in self.fleets))

    async def ask(self, what: str) -> dict[str, Any]:
        """Ask the leading coordinator "read" or "memory": see `probed_coordinator`."""
        return await self._ask(self.leader, what)

    async def _ask(self, name: str, what: str) -> dict[str, Any]:
        return await ask(self._socket(name), what)

    def cpu(self) -> tuple[float, float]:
        """CPU seconds of the leading coordinator and of Redis; what was seen last if that coordinator has ended."""
        with suppress(FileNotFoundError, ProcessLookupError):
            self._cpu = cpu_s(self.coordinator), cpu_s(self.redis.pid)
        return self._cpu

    async def kill_leader(self) -> float:
        """End it as a lost machine does; from now on the standby counts as the leader. Returns when that was."""
        await self._ask(self._other, "read")  # its start is not the takeover's
        struck = time.monotonic()
        os.kill(self.coordinator, signal.SIGKILL)
        self.leader = self._other
        self.coordinator = self._pids[self.leader]
        return struck

    async def note_terms(self, seen: set[bytes]) -> None:
        """Note each coordinator's term that the store has, for ever."""
        while True:
            seen.add(await asyncio.to_thread(self.redis.command, "GET", TERM))
            await asyncio.sleep(_LOOK_S)

    def warnings(self) -> Counter[str]:
        """How often coordinators warned of each thing, numbers and names left out."""
        texts = ((self.redis.directory / f"{name}.log").read_text() for name in _COORDINATORS)
        return Counter(found for text in texts for line in text.splitlines() if (found := _matter(line)))

    def lapses(self) -> int:
        """How often the lease of the fleet was over before it was renewed."""
        return sum(count for text, count in self.warnings().items() if _LAPSED in text)


def _lives(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").exists() and _state(pid) != "Z"


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def _matter(line: str) -> str:
    """What a line of the log is about: its event and its reason. Empty for a line that is no warning."""
    with suppress(ValueError):
        said = json.loads(line)
        if said["level"] in {"warning", "error"}:
            return re.sub(r"[\d.]+", "N", f"{said['event']}: {said['reason']}" if said.get("reason") else said["event"])
    return ""
