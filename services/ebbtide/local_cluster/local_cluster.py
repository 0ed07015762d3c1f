"""Runs a whole cluster on this machine: its programs, their settings, and the order in which they end.

Invariant: the cluster writes only in its directory, except for sockets if the directory's path is too long for them,
and for mirrors of weights where shared memory has room (`host_resources`). One cluster at a time works there; it holds
the lock on `cluster.lock`, and clears at its start what a former one left.
"""

import fcntl
import json
import os
import secrets
import shutil
import socket
import sys
import tempfile
import tomllib
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

from msgspec import Struct
from msgspec.structs import replace

from ebbtide.client.client import read_spec
from ebbtide.environments import BUILT_IN
from ebbtide.errors import InvalidRequest
from ebbtide.free_ports import free_port
from ebbtide.gpu_memory import GpuDevice, visible_devices
from ebbtide.local_cluster.gpu_placement import (
    TRAINER,
    DeviceShare,
    Placement,
    chosen_devices,
    place_devices,
    told,
)
from ebbtide.local_cluster.host_resources import (
    CheckpointSize,
    MirrorFolder,
    checkpoint_size,
    engine_need,
    mirror_folder,
    torch_on_gpus,
    trainer_bytes,
    vllm_on_gpus,
)
from ebbtide.local_cluster.launcher import Launcher, Program, launcher, redis_command, tethered
from ebbtide.local_cluster.serving_engine import serving_engine
from ebbtide.types.run import RunSpec, to_mapping

#: Stages in the order in which they end: a gateway's answers first, then workers hand over, services end after their
#: clients.
_GATEWAY, _WORKERS, _RUN, _COORDINATOR, _RELAY, _REDIS, _GUARD, _SERVING = range(8)
#: Answers under way get so long when the cluster ends: its user waits.
_GATEWAY_DRAIN_S: Final = 2.0
#: A unix socket's path must fit into 108 bytes.
_MAX_SOCKET_PATH: Final = 100
#: Waiting threads sleep: on cores that other programs use too, spinning ones train ten times slower.
_SLEEPING: Final = {"OMP_WAIT_POLICY": "PASSIVE"}
_CLEARED: Final = ("logs", "ready", "redis", "relay", "ledgers")
#: Within which an owner lends its GPU to an engine that boots: a trainer's step may have to end first.
_LOAN_S: Final = 600.0
#: Rollouts of a worker at once: a GPU is busy only with many.
_SLOTS: Final = 64
_GPU_SLOTS: Final = 256
#: Names of engines that are no workers by number, as placements have them.
SERVING, LENT = "serving", "worker on the trainer's GPU"
_GRANTS: Final = "grants"
_BASE_MODEL_MODULE: Final = "ebbtide.trainer.base_model"


class ClusterShape(Struct, frozen=True, kw_only=True):
    model: Path
    workers: int = 2
    slots: int = 0  # rollouts of a worker at once; 0: 64, and 256 on GPUs
    ranks: int = 1  # processes of the trainer
    coordinator: str
    standby: str = ""  # address of a second coordinator; empty: none
    relay: str
    gateway: str = ""  # address of a gateway; empty: none
    tool_parser: str = ""  # the gateway's, by vLLM's name; empty: none
    flush_tokens: int = 8
    flush_interval_ms: int = 100
    worker_configs: tuple[Path, ...] = ()  # TOML files of settings for the workers, which take them in turn
    trainer_config: Path | None = None  # TOML file of settings for the trainer
    served: Path | None = None  # checkpoint of a serving engine beside the cluster; None: there is none
    served_name: str = "served"  # by which its users call it
    #: The workers run beside the serving engine, by grants of its guard. On a GPU they boot by a grant too, so `boot`
    #: leaves it to `add_worker` to start them, once there is a guard.
    borrowed: bool = False
    window_s: float = 0.0  # with `generate`: the trainer's setting of this name
    device_cores: tuple[int, ...] = ()  # of the trainer and of workers that borrow its device; empty: any
    machines: tuple[int, ...] = ()  # a core for each of the other workers, in turn; empty: any core
    generate: bool = False  # one more worker runs on the trainer's device, which it lends between its steps
    environments: tuple[str, ...] = ()  # whose code runs as the user, who may name others than the built-in ones
    heartbeat_timeout_s: float = 0.0  # the coordinator's setting of this name; 0: its own
    lease_ttl_s: float = 10.0  # silence after which a trainer loses its run

    @property
    def coordinators(self) -> str:
        """The coordinators' addresses, as programs take them."""
        return ",".join(filter(None, (self.coordinator, self.standby)))

    def config(self, number: int) -> Path | None:
        """The file of settings of a worker, counted from 0."""
        return self.worker_configs[number % len(self.worker_configs)] if self.worker_configs else None

    @property
    def places(self) -> int:
        """The number of workers that run at the same time at most, without the one on the trainer's device."""
        return max(self.workers, len(self.machines))

    @property
    def allowed_environments(self) -> str:
        """The environments that runs may name, as programs take them."""
        return ",".join(dict.fromkeys([*BUILT_IN, *self.environments]))


class LocalCluster:
    """Programs in one directory; made by `local_cluster()`, and running from `boot` on."""

    def __init__(
        self,
        directory: Path,
        redis_socket: Path,
        launched: Launcher,
        mirrors: MirrorFolder,
        *,
        devices: tuple[GpuDevice, ...] = (),
        notify: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`devices`: the GPUs that its programs may use; `notify` is told where they run."""
        self.directory = directory
        self.launcher = launched
        self.placement: Placement = {}
        self._mirrors, self._devices, self._notify = mirrors, devices, notify
        self._holders: dict[int, str] = {}  # place -> the last worker there
        self.token_file = directory / "token"
        self.grants = redis_socket.parent.parent / _GRANTS
        self._redis_socket = redis_socket
        self._workers = 0

    @property
    def workers(self) -> list[str]:
        """Names of all workers ever started, in order."""
        return [f"worker-{number}" for number in range(1, self._workers + 1)]

    @property
    def ledgers(self) -> dict[str, Path]:
        """worker -> its record of generated tokens, for all workers ever started."""
        return {name: self._ledger(name) for name in self.workers}

    def _plan(self, shape: ClusterShape) -> None:
        self.shape = shape
        self.placement = placement_of(shape, self._devices)
        for line in told(self.placement):
            self._notify(line)
        self._notify(self._mirrors.choose(checkpoint_size(shape.model).mirror_bytes))

    async def boot(self, shape: ClusterShape) -> None:
        """Starts everything but a guard of the serving engine.

        Raises `LaunchFailed`, or `InvalidRequest` if GPUs are too few or too small.
        """
        self._plan(shape)
        self.token_file.touch(0o600)
        self.token_file.write_text(secrets.token_urlsafe(32))
        await self.launcher.start(self._redis())
        await self.launcher.start(self._coordinator("coordinator", shape.coordinator))
        if shape.standby:
            await self.launcher.start(self._coordinator("coordinator-2", shape.standby))
        at_once = 0 if shape.borrowed and self.placement else shape.workers
        workers = [self.next_worker(borrowed=shape.borrowed) for _ in range(at_once)]
        workers += [self.lent_worker()] if shape.generate else []
        gateways = [self._gateway()] if shape.gateway else []
        guards = [self._trainer_guard()] if shape.generate else []
        serving = [self._serving(shape.served)] if shape.served else []
        services = [self._relay(), *guards, self._trainer(), self._driver(), *gateways]
        await self.launcher.start_all([*serving, *services, *workers])

    @property
    def serving_url(self) -> str:
        """The URL of the serving engine."""
        return f"http://{self.launcher.process(SERVING).address}"

    async def guard(self, upstream: str, **settings: object) -> str:
        """Starts a serving-guard in front of an engine. Returns the URL for its users. Raises `LaunchFailed`."""
        flags = {"listen": free_address(), "upstream": upstream, "grant_dir": self.grants, **settings}
        program = self._service("serving-guard", "ebbtide.serving_guard", _GUARD, **flags)
        return f"http://{(await self.launcher.start(program)).address}"

    async def run_once(self, name: str, module: str, *arguments: str, watch: Callable[[], None]) -> None:
        """Runs a module to its end, without the cluster's addresses. Raises `LaunchFailed` if it fails."""
        command = tethered(sys.executable, "-m", module, *arguments)
        program = Program(name=name, command=command, environment=_SLEEPING | os.environ, log=self.log(name))
        await self.launcher.run_once(program, watch)

    async def add_worker(self) -> str:
        """Starts one more worker, and waits until it is ready. Returns its name."""
        program = self.next_worker(borrowed=self.shape.borrowed)
        await self.launcher.start(program)
        return program.name

    def _serving(self, model: Path) -> Program:
        log, share, name = self.log(SERVING), self.placement.get(SERVING), self.shape.served_name
        return serving_engine(model, name, free_address(), log, share=share, stage=_SERVING, name=SERVING)

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
        """Returns the address of Redis once it answers, which it does when its data is loaded."""
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
        timeout_s = self.shape.heartbeat_timeout_s
        flags |= {"heartbeat_timeout_s": timeout_s} if timeout_s else {}
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
        cores = self.shape.device_cores
        threads = max(1, (len(cores) or os.cpu_count() or 1) // ranks)
        lending: dict[str, object] = {"generate": True, "grant_dir": self.grants} if self.shape.generate else {}
        lending |= {"window_s": self.shape.window_s} if self.shape.window_s else {}
        flags: dict[str, object] = {"ranks": ranks, **lending, **self._permissions("trainer")}
        if (config := self.shape.trainer_config) is not None:
            flags |= {"config": config}
        if config is None or "threads" not in tomllib.loads(config.read_text()):
            flags |= {"threads": threads}
        program = self._service(TRAINER, "ebbtide.trainer", _RUN, **flags)
        return _seeing(self.placement.get(TRAINER), replace(program, cores=cores))

    def _trainer_guard(self) -> Program:
        """It outlives the trainer, as everywhere."""
        flags = {"owner": "trainer", "grant_dir": self.grants}
        return self._service("trainer-guard", "ebbtide.serving_guard", _GUARD, **flags)

    def _driver(self) -> Program:
        own = {"environments_trust": True} if self.shape.environments else {}
        return self._service("driver", "ebbtide.driver", _RUN, **own, **self._permissions("driver"))

    def _gateway(self) -> Program:
        flags = {"listen": self.shape.gateway, "holder": "gateway", "drain_s": _GATEWAY_DRAIN_S}
        flags |= {"tool_parser": self.shape.tool_parser} if self.shape.tool_parser else {}
        return self._service("gateway", "ebbtide.gateway", _GATEWAY, **flags)

    def _permissions(self, holder: str) -> dict[str, object]:
        """Settings that trainer and driver share. The cluster serves its user alone, whose files runs may use."""
        roots = {"data_roots": "/", "output_roots": "/"}
        return {"holder": holder, "environments_allowed": self.shape.allowed_environments, **roots}

    def next_worker(self, *, borrowed: bool = False, core: int | None = None) -> Program:
        """Returns one more worker, to be started: on the machine with this core, or in the first place that is free."""
        shape = self.shape
        place = self._free_place() if core is None else shape.machines.index(core)
        cores = (shape.machines[place % len(shape.machines)],) if shape.machines else ()
        share = self.placement.get(_place(place))
        program = self._worker(shape.config(place), share, borrowed=borrowed)
        self._holders[place] = program.name
        return replace(program, cores=cores)

    def lent_worker(self) -> Program:
        """Returns the worker on the trainer's device, to be started."""
        shape = self.shape
        program = self._worker(shape.config(shape.places), self.placement.get(LENT), borrowed=True)
        return replace(program, cores=shape.device_cores)

    def _free_place(self) -> int:
        """The first place without a worker that runs, or is to be started again. Where all have one, and no GPU is
        dealt out, a new one."""
        for place in range(self.shape.places):
            if place not in self._holders or not self._runs(self._holders[place]):
                return place
        if self.placement:
            raise InvalidRequest(
                f"no GPU is left for a worker beside {', '.join(self._holders.values())}", field="--gpus"
            )
        return max(self._holders, default=-1) + 1

    def _runs(self, worker: str) -> bool:
        try:
            return self.launcher.keeps(worker)
        except KeyError:
            return True  # not yet: it is to be started

    def _worker(self, config: Path | None, share: DeviceShare | None, *, borrowed: bool) -> Program:
        self._workers += 1
        name, shape = self.workers[-1], self.shape
        flags: dict[str, object] = {"config": config} if config else _cpu_engine()
        flags |= {"kind": "borrowed", "grant_dir": self.grants} if borrowed else {"kind": "spot"}
        if share is not None and share.kv_cache_mib:
            flags |= {"vllm_kv_cache_mib": share.kv_cache_mib, "vllm_gpu_memory_utilization": share.utilization}
        program = self._service(
            name,
            "ebbtide.rollout_worker",
            _WORKERS,
            worker_id=name,
            model=shape.model,
            slots=shape.slots or (_GPU_SLOTS if share else _SLOTS),
            flush_tokens=shape.flush_tokens,
            flush_interval_ms=shape.flush_interval_ms,
            counter_file=self._ledger(name),
            mirror_dir=self._mirrors.path,
            **flags,
        )
        lent_s = _LOAN_S if borrowed and share else 0.0
        return _seeing(share, replace(program, boot_s=lent_s + checkpoint_size(shape.model).boot_s))

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
            boot_s=CheckpointSize().boot_s,
        )

    def _environment(self) -> dict[str, str]:
        """Leaves out the user's own EBBTIDE_ variables, which may be of another cluster."""
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


def usable_devices(gpus: str) -> tuple[GpuDevice, ...]:
    """Returns the GPUs that are visible here and that `--gpus` leaves. Raises `InvalidRequest`."""
    return chosen_devices(visible_devices(), gpus)


def placement_of(shape: ClusterShape, devices: tuple[GpuDevice, ...]) -> Placement:
    """Decides which of the devices the cluster's programs use. Raises `InvalidRequest` if they are too few.

    Builds without CUDA use none. Then their programs see what this process sees, as on a machine without GPUs.
    """
    if not devices:
        return {}
    engines = [
        engine_need(
            _place(place), shape.model, shape.config(place), beside=SERVING if shape.borrowed and shape.served else ""
        )
        for place in range(shape.places)
    ]
    if shape.generate:
        engines.append(engine_need(LENT, shape.model, shape.config(shape.places), beside=TRAINER))
    if shape.served:
        engines.insert(0, engine_need(SERVING, shape.served, None))
    engines = [engine for engine in engines if vllm_on_gpus() or not engine.is_vllm]
    ranks = shape.ranks if torch_on_gpus() else 0
    if not ranks:
        engines = [engine for engine in engines if engine.beside != TRAINER]
    needed = trainer_bytes(shape.model, shape.trainer_config)
    return place_devices(devices, engines, ranks=ranks, trainer_bytes=needed)


def _place(number: int) -> str:
    """The name of a worker's place, counted from 0, in placements."""
    return f"worker-{number + 1}"


@asynccontextmanager
async def local_cluster(
    directory: Path, notify: Callable[[str], None], *, gpus: str = ""
) -> AsyncIterator[LocalCluster]:
    """Gives a cluster in `directory`, not booted yet. Its processes are gone once the block is left.

    `notify` gets a line for each program that ends unasked, and says what runs where. `gpus`: a count or a list of the
    GPUs to use (see `chosen_devices`); empty: all that are visible. Raises `InvalidRequest` if another cluster uses the
    directory, or it is not writable, or there are no such GPUs.
    """
    devices = usable_devices(gpus)
    with _prepared(directory) as redis_socket, mirror_folder(directory) as mirrors:
        async with launcher(notify) as launched:
            yield LocalCluster(directory, redis_socket, launched, mirrors, devices=devices, notify=notify)


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
        for name in (*_CLEARED, _GRANTS):
            shutil.rmtree(directory / name, ignore_errors=True)
        for name in _CLEARED:
            (directory / name).mkdir()
        with _socket_path(directory) as path:
            yield path


@contextmanager
def _socket_path(directory: Path) -> Iterator[Path]:
    """Gives the path of the Redis socket: in the directory, or in a temporary one if that path is too long."""
    path = directory.resolve() / "redis" / "redis.sock"
    if len(str(path)) <= _MAX_SOCKET_PATH:
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="ebb-") as short:
        (Path(short) / "redis").mkdir()
        yield Path(short) / "redis" / "redis.sock"


def free_address(wanted: str = "127.0.0.1:0") -> str:
    """Replaces port 0 by a free port, so that restarted programs return to their address."""
    host, _, port = wanted.rpartition(":")
    if port != "0":
        return wanted
    return f"{host}:{free_port(host)}"


def _seeing(share: DeviceShare | None, program: Program) -> Program:
    """Returns the program with its GPUs alone in its environment; unchanged without a share."""
    return replace(program, environment=program.environment | share.environment) if share else program


def _flags(settings: dict[str, object]) -> Iterator[str]:
    for name, value in settings.items():
        flag = f"--{name.replace('_', '-')}"
        yield from (flag,) if value is True else (flag, str(value))


def _cpu_engine() -> dict[str, object]:
    """Settings of vLLM's CPU build, whose engines share a few cores; none for other builds.

    With two threads each, two engines on two cores generate a tenth of the tokens.
    """
    if "cpu" not in version("vllm"):
        return {}
    return {"vllm_threads": 1, "vllm_dtype": "float32", "vllm_enforce_eager": True}


def demo_run() -> RunSpec:
    """Returns the demo's run, whose base model a cluster serves where no model is named."""
    return read_spec(tomllib.loads(files("ebbtide.local_cluster").joinpath("demo.toml").read_text()))


async def base_model(
    cluster: LocalCluster, spec: RunSpec, cache: Path, tell: Callable[[str], None], **options: object
) -> Path:
    """Returns the checkpoint for the spec's environment and seed; `tell` hears the progress.

    `options`: further ones of `ebbtide base-model`. Raises `LaunchFailed`.
    """
    spec_file, log = cluster.directory / "base-model.json", cluster.log("base-model")
    spec_file.write_text(json.dumps(to_mapping(spec)))
    said: dict[str, Any] = {}

    def watch() -> None:
        said.update(_last(log))
        if "step" in said:
            tell(f"step {said['step']}: loss {said['loss']:.2f}, accuracy {said['accuracy']:.2f}")

    arguments = ("--spec", str(spec_file), "--directory", str(cache), "--json", *_flags(options))
    await cluster.run_once("base-model", _BASE_MODEL_MODULE, *arguments, watch=watch)
    return Path(said["path"])


def _last(log: Path) -> dict[str, Any]:
    """Returns the last line of JSON in the program's log."""
    for line in reversed(log.read_text(errors="replace").split("\n")[:-1]):
        if line.startswith("{"):
            said: dict[str, Any] = json.loads(line)
            return said
    return {}
