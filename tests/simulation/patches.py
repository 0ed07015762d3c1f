"""What the code under test finds in place of clocks, chance, gRPC, threads and the print of a terminal."""

import asyncio
import itertools
import logging
import os
import random
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, Final

import grpc
import structlog

import ebbtide.rollout_worker.installs.host_mirrors
import ebbtide.rollout_worker.service
import ebbtide.rpc.server
import ebbtide.runtime
import ebbtide.telemetry
import ebbtide.weight_relay.library.relay_disk
from ebbtide.transfer import Mirror, Puller
from tests.fakes import scripted_engine
from tests.simulation.engine import Told, engine_class
from tests.simulation.grants import Lease, page
from tests.simulation.grpc_client import SimChannel
from tests.simulation.grpc_server import SimServer
from tests.simulation.loop import Exited, Proc, SimLoop, current
from tests.simulation.network import Network

#: When the simulated world begins, on its wall clocks.
EPOCH: Final = 1_700_000_000.0
#: Told of log lines: level, event, values.
Log = Callable[[str, str, dict[str, Any]], None]


class Inline:
    """In place of a thread pool."""

    def __init__(self, _workers: int) -> None:
        pass

    def __enter__(self) -> "Inline":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def map(self, function: Callable[[Any], Any], items: Iterable[Any]) -> list[Any]:
        return [function(item) for item in items]


class Logger:
    """In place of structlog's."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def bind(self, **_: Any) -> "Logger":
        return self

    def debug(self, event: str, **values: Any) -> None:
        pass


def _logger_class(log: Log) -> type[Logger]:
    class Told(Logger):
        pass

    def method(level: str) -> Callable[..., None]:
        return lambda self, event, **values: log(level, event, values)

    for level in ("info", "warning", "error", "exception"):
        setattr(Told, level, method(level))
    return Told


class Records(logging.Handler):
    """What goes to the standard library's logging."""

    def __init__(self, log: Log) -> None:
        super().__init__(logging.INFO)
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        self._log(record.levelname.lower(), record.getMessage(), {"error": repr(error)} if error else {})


def _hash(numbers: "itertools.count[int]") -> Callable[[Any], int]:
    def number(self: Any) -> int:
        found: int = self.__dict__.setdefault("_number", 0) or next(numbers)
        self._number = found
        return found

    return number


def _kept(mirror: Mirror, mirrors: list[Mirror]) -> Mirror:
    mirrors.append(mirror)
    return mirror


@contextmanager
def patched(
    loop: SimLoop, network: Network, told: Told, log: Log, ended: Callable[[Proc, int], None], borrow: Any
) -> Iterator[None]:
    """The world as the code under test sees it, for one run. `borrow`: see `grants.borrower`. Not reentrant."""
    chance, events = loop.random, itertools.count(1)
    disk: Any = ebbtide.weight_relay.library.relay_disk
    mirrors: list[Mirror] = []  # those of processes that are killed are closed by nobody else
    reflection = SimpleNamespace(enable_server_reflection=lambda *_: None, SERVICE_NAME="reflection")
    logger: Any = _logger_class(log)
    records = Records(log)

    def end_at_once(code: int) -> None:
        ended(current.get(), code)
        raise Exited

    changes: list[tuple[Any, str, Any]] = [
        (time, "monotonic", lambda: loop.now),
        (time, "time", lambda: EPOCH + loop.now + current.get(loop.outside).clock),
        (os, "_exit", end_at_once),
        (secrets, "token_hex", lambda n=32: f"{chance.getrandbits(8 * n):0{2 * n}x}"),
        (secrets, "token_bytes", chance.randbytes),
        (random, "uniform", chance.uniform),
        (random, "random", chance.random),
        (asyncio.Event, "__hash__", _hash(events)),
        (grpc.aio, "insecure_channel", lambda target, **_: SimChannel(network, target)),
        (grpc.aio, "server", lambda interceptors=None, **_: SimServer(network, interceptors)),
        (ebbtide.rpc.server, "reflection", reflection),
        (ebbtide.telemetry, "rpc_observer", lambda: None),
        (ebbtide.runtime.Shutdown, "ready", lambda _self, _address: None),
        (disk, "ThreadPoolExecutor", Inline),
        (disk, "fcntl", SimpleNamespace(flock=lambda *_: None, LOCK_EX=0, LOCK_NB=0)),
        (Puller, "warm_up", lambda _self: None),
        (ebbtide.rollout_worker.installs.host_mirrors, "Mirror", lambda *args: _kept(Mirror(*args), mirrors)),
        (scripted_engine, "ScriptedEngine", engine_class(scripted_engine.ScriptedEngine, told)),
        (ebbtide.rollout_worker.service, "_borrowed", page),
        (ebbtide.rollout_worker.service, "_borrow", borrow),
        (ebbtide.rollout_worker.service, "_sleeping", lambda *_: None),
        (ebbtide.rollout_worker.service, "DeviceLease", Lease),
        (logging, "lastResort", None),
    ]
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in changes]
    structured = structlog.get_config()
    root = logging.getLogger()
    root.addHandler(records)
    try:
        structlog.configure(
            processors=[], wrapper_class=logger, logger_factory=lambda *_: None, cache_logger_on_first_use=False
        )
        for owner, name, value in changes:
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)
        for mirror in mirrors:
            mirror.close()
        structlog.configure(**structured)
        root.removeHandler(records)
