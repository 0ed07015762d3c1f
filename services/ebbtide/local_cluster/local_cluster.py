"""A whole cluster on this machine: which programs, how they are started, and in which order they end.

Invariant: all that the cluster writes lies in its directory (but for its sockets, where the directory's path is too
long for one), and one cluster at a time, holder of the lock on `cluster.lock`, works in it. What a former one left
there is cleared at the start.
"""

import fcntl
import os
import secrets
import shutil
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Final

from msgspec import Struct

from ebbtide.errors import InvalidRequest
from ebbtide.local_cluster.launcher import Launcher, launcher
from ebbtide.local_cluster.program_process import Program, tethered
from ebbtide.local_cluster.serving_engine import serving_engine
from ebbtide.redis_server import redis_command

#: What ends first: workers hand over, then the run's own programs, then what these talk to.
_WORKERS, _RUN, _COORDINATOR, _RELAY, _REDIS, _GUARD, _SERVING = range(7)
#: A unix socket's path must fit into 108 bytes.
_MAX_SOCKET_PATH: Final = 100
#: Threads that wait for others sleep: on cores that other programs use too, spinning ones train ten times slower.
_SLEEPING: Final = {"OMP_WAIT_POLICY": "PASSIVE"}
_CLEARED: Final = ("logs", "ready", "redis", "relay", "ledgers")
#: Not in /dev/shm, where nobody would clear what killed workers leave. They make them themselves, theirs alone.
_MIRRORS: Final = "mirrors"
_GRANTS: Final = "grants"


class ClusterShape(Struct, frozen=True, kw_only=True):
    """What the cluster is made of. `worker_config`: a TOML file of settings for the workers. `borrowed`: these run
    beside a serving engine, by grants of its guard. `ranks`: processes of the trainer. `lease_ttl_s`: for how long a
    trainer may be silent. `standby`: the address of a second coordinator; none if empty."""

    model: Path
    workers: int = 2
    slots: int = 64
    ranks: int = 1
    coordinator: str
    standby: str = ""
    relay: str
    flush_tokens: int = 8
    flush_interval_ms: int = 100
    worker_config: Path | None = None
    borrowed: bool = False
    lease_ttl_s: float = 10.0

    @property
    def coordinators(self) -> str:
        """What programs are told of where the coordinator is."""
        return ",".join(filter(None, (self.coordinator, self.standby)))


class LocalCluster:
    """Programs in one directory; made by `local_cluster()`, and running from `boot` on."""

    def __init__(self, directory: Path, redis_socket: Path, launched: Launcher) -> None:
        self.directory = directory
        self.launcher = launched
        self.token_file = directory / "token"
        self.grants = redis_socket.parent.parent / _GRANTS
        self._redis_socket = redis_socket
        self._workers = 0

    @property
    def workers(self) -> list[str]:
        """The names of all workers that there ever were, in the order of their starts."""
        return [f"worker-{number}" for number in range(1, self._workers + 1)]

    @property
    def ledgers(self) -> dict[str, Path]:
        """The record of generated tokens of each worker that there ever was."""
        return {name: self._ledger(name) for name in self.workers}

    async def boot(self, shape: ClusterShape) -> None:
        """Start everything. Raises `LaunchFailed`."""
        self.shape = shape
        self.token_file.touch(0o600)
        self.token_file.write_text(secrets.token_urlsafe(32))
        await self.launcher.start(self._redis())
        await self.launcher.start(self._coordinator("coordinator", shape.coordinator))
        if shape.standby:
            await self.launcher.start(self._coordinator("coordinator-2", shape.standby))
        workers = [self._next_worker() for _ in range(shape.workers)]
        await self.launcher.start_all([self._relay(), self._trainer(), self._driver(), *workers])

    async def serve(self, model: Path, served_name: str) -> str:
        """Start a serving engine, and wait until it answers. Returns its URL. Raises `LaunchFailed`."""
        program = serving_engine(model, served_name, free_address(), self.log("serving"), stage=_SERVING)
        return f"http://{(await self.launcher.start(program)).address}"

    async def guard(self, upstream: str, **settings: object) -> str:
        """Start a serving-guard in front of an engine. Returns the URL for its users. Raises `LaunchFailed`."""
        flags = {"listen": free_address(), "upstream": upstream, "grant_dir": self.grants, **settings}
        program = self._service("serving-guard", "ebbtide.serving_guard", _GUARD, **flags)
        return f"http://{(await self.launcher.start(program)).address}"

    async def run_once(self, name: str, module: str, *arguments: str, watch: Callable[[], None]) -> None:
        """Run a module that knows no service to its end. Raises `LaunchFailed` if it fails."""
        command = tethered(sys.executable, "-m", module, *arguments)
        program = Program(name=name, command=command, environment=_SLEEPING | os.environ, log=self.log(name))
        await self.launcher.run_once(program, watch)

    async def add_worker(self) -> str:
        """Start one more worker, and wait until it is ready. Returns its name."""
        program = self._next_worker()
        await self.launcher.start(program)
        return program.name

    def _redis(self) -> Program:
        data = self.directory / "redis"
        return Program(
            name="redis",
            command=tethered(*redis_command(data, self._redis_socket)),
            environment=dict(os.environ),
            log=self.log("redis"),
            ready=self._redis_ready,
            stage=_REDIS,
        )

    def _redis_ready(self) -> str | None:
        """Its address once it answers: it does so when its data is loaded."""
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(1.0)
            try:
                connection.connect(str(self._redis_socket))
                connection.sendall(b"PING\r\n")
                return str(self._redis_socket) if connection.recv(16).startswith(b"+PONG") else None
            except OSError:
                return None

    def _coordinator(self, name: str, listen: str) -> Program:
        flags: dict[str, object] = {"standby": True} if self.shape.standby else {}
        return self._service(
            name,
            "ebbtide.coordinator",
            _COORDINATOR,
            server_listen=listen,
            store_url=f"unix://{self._redis_socket}",
            lease_ttl_s=self.shape.lease_ttl_s,
            **flags,
        )

    def _relay(self) -> Program:
        data = self.directory / "relay"
        return self._service(
            "relay", "ebbtide.weight_relay", _RELAY, server_listen=self.shape.relay, data_dir=data, keep_versions=3
        )

    def _trainer(self) -> Program:
        ranks = self.shape.ranks
        threads = max(1, (os.cpu_count() or 1) // ranks)
        return self._service("trainer", "ebbtide.trainer", _RUN, holder="trainer", threads=threads, ranks=ranks)

    def _driver(self) -> Program:
        return self._service("driver", "ebbtide.driver", _RUN, holder="driver")

    def _next_worker(self) -> Program:
        self._workers += 1
        name = self.workers[-1]
        shape = self.shape
        flags: dict[str, object] = {"config": shape.worker_config} if shape.worker_config else _cpu_engine()
        flags |= {"kind": "borrowed", "grant_dir": self.grants} if shape.borrowed else {"kind": "spot"}
        return self._service(
            name,
            "ebbtide.rollout_worker",
            _WORKERS,
            worker_id=name,
            model=shape.model,
            slots=shape.slots,
            flush_tokens=shape.flush_tokens,
            flush_interval_ms=shape.flush_interval_ms,
            counter_file=self._ledger(name),
            mirror_dir=self.directory / _MIRRORS,
            **flags,
        )

    def _service(self, name: str, module: str, stage: int, **settings: object) -> Program:
        ready = self.directory / "ready" / f"{name}.json"
        flags = _flags({"die_with_parent": os.getpid(), "ready_file": ready, **settings})
        return Program(
            name=name,
            command=(sys.executable, "-m", module, *flags),
            environment=self._environment(),
            log=self.log(name),
            ready_file=ready,
            stage=stage,
            boot_s=180.0,
        )

    def _environment(self) -> dict[str, str]:
        """Settings of another cluster that the user may have in the environment are not for this one."""
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("EBBTIDE_")}
        return (
            _SLEEPING
            | inherited
            | {
                "EBBTIDE_COORDINATOR": self.shape.coordinators,
                "EBBTIDE_RELAY": self.shape.relay,
                "EBBTIDE_TOKEN_FILE": str(self.token_file),
            }
        )

    def log(self, name: str) -> Path:
        return self.directory / "logs" / f"{name}.log"

    def _ledger(self, name: str) -> Path:
        return self.directory / "ledgers" / f"{name}.ledger"


@asynccontextmanager
async def local_cluster(directory: Path, notify: Callable[[str], None]) -> AsyncIterator[LocalCluster]:
    """A cluster in `directory`, not booted yet. When the block is left, however it is left, its processes are gone.

    `notify` is told in one line what happens to programs unasked. Raises `InvalidRequest` if the directory is
    another's, or cannot be written.
    """
    with _prepared(directory) as redis_socket:
        async with launcher(notify) as launched:
            yield LocalCluster(directory, redis_socket, launched)


@contextmanager
def _prepared(directory: Path) -> Iterator[Path]:
    """Locks, clears and fills the directory. Gives the path of the Redis socket."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        opened = (directory / "cluster.lock").open("w")
    except OSError as error:
        raise InvalidRequest(f"cannot be written ({error.strerror}); name another", field=str(directory)) from None
    with opened as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise InvalidRequest("another cluster runs in it; name another directory", field=str(directory)) from None
        for name in (*_CLEARED, _MIRRORS, _GRANTS):
            shutil.rmtree(directory / name, ignore_errors=True)
        for name in _CLEARED:
            (directory / name).mkdir()
        try:
            with _socket_path(directory) as path:
                yield path
        finally:
            shutil.rmtree(directory / _MIRRORS, ignore_errors=True)  # of killed workers, as large as the weights


@contextmanager
def _socket_path(directory: Path) -> Iterator[Path]:
    """Of Redis: in the directory, or where that one's path is too long in a short one for the while."""
    path = directory.resolve() / "redis" / "redis.sock"
    if len(str(path)) <= _MAX_SOCKET_PATH:
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="ebb-") as short:
        (Path(short) / "redis").mkdir()
        yield Path(short) / "redis" / "redis.sock"


def free_address(wanted: str = "127.0.0.1:0") -> str:
    """`wanted`, with a free port in place of port 0: programs that are started again come back where they were."""
    host, _, port = wanted.rpartition(":")
    if port != "0":
        return wanted
    with socket.socket() as probe:
        probe.bind((host, 0))
        return f"{host}:{probe.getsockname()[1]}"


def _flags(settings: dict[str, object]) -> Iterator[str]:
    for name, value in settings.items():
        flag = f"--{name.replace('_', '-')}"
        yield from (flag,) if value is True else (flag, str(value))


def _cpu_engine() -> dict[str, object]:
    """Settings of vLLM's CPU build for several engines that share a few cores; none for other builds.

    One thread each: two engines with two threads each on two cores get a tenth of the tokens out of them.
    """
    if "cpu" not in version("vllm"):
        return {}
    return {"vllm_threads": 1, "vllm_dtype": "float32", "vllm_enforce_eager": True}
