"""The rivals, each as a process that grants or does not: who decides, where users' requests go, and with which SLO.

alone      the rollout engine has no grant
unguarded  it always has one
rollouts   likewise, and all the memory that it can use
split      as unguarded, but each engine has a core of its own
rose       ROSE's policy as reported, with the setting named behind the colon
ours       the serving-guard in the traffic; behind a colon, further flags of it: FLAG=VALUE+FLAG=VALUE
observe    the serving-guard beside the traffic
"""

import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from msgspec import Struct

from benchmarks.pair.rivals.rose import SETTING, TABLES
from benchmarks.pair.stack import WORKER, Pair
from ebbtide.grants import socket_path
from ebbtide.local_cluster.launcher import Program, ProgramProcess
from ebbtide.rpc.channel import open_socket
from ebbtide.types.grants import GuardStatus
from ebbtide.v1 import grants_pb2
from ebbtide.v1.grants_pb2_grpc import GrantsStub
from ebbtide.wire import from_proto
from tests.support.waiting import wait_until

_ROOT: Final = Path(__file__).parents[2]
_MODULES: Final = {
    "ours": "ebbtide.serving_guard",
    "observe": "ebbtide.serving_guard",
    "rose": "benchmarks.pair.rivals.rose",
    "unguarded": "benchmarks.pair.rivals.always",
    "rollouts": "benchmarks.pair.rivals.always",
    "split": "benchmarks.pair.rivals.always",
}
#: Policies whose guard stands in the traffic.
PROXIED: Final = ("ours", "rose")
OURS: Final = ("ours", "observe")


class Slo(Struct, frozen=True, kw_only=True):
    """Targets, seconds."""

    ttft_s: float
    tpot_s: float


class Guard:
    """A started one. `url`: where users' requests go."""

    def __init__(self, url: str, stub: GrantsStub | None, process: ProgramProcess | None) -> None:
        self.url, self._stub, self.process = url, stub, process

    async def status(self) -> GuardStatus:
        if self._stub is None:
            return GuardStatus()
        async for found in self._stub.WatchGuard(grants_pb2.WatchGuardRequest(), timeout=10):
            return from_proto(found, GuardStatus)
        raise RuntimeError("the guard said nothing")


@asynccontextmanager
async def guard(
    pair: Pair, policy: str, slo: Slo, upstream: str, extra: dict[str, str], tables: str = ""
) -> AsyncIterator[Guard]:
    """The guard of `policy` (its name before the colon), with the worker attached to it. `extra`: further flags
    of ours; `tables`: of ROSE."""
    name, _, setting = policy.partition(":")
    if name.startswith("alone"):
        yield Guard(upstream, None, None)
        return
    process = ProgramProcess(_program(pair, name, setting, slo, upstream, extra, tables))
    try:
        await process.wait_ready()
        pair.guard_pid = process.pid
        async with open_socket(socket_path(pair.grants)) as channel:
            made = Guard(f"http://{process.address}" if name in PROXIED else upstream, GrantsStub(channel), process)

            async def attached() -> bool:
                return any(one.worker_id == WORKER for one in (await made.status()).borrowers)

            await wait_until(attached, timeout=30, what="the worker at the guard")
            yield made
    finally:
        pair.guard_pid = 0
        await process.stop()


def flags_of(setting: str) -> dict[str, str]:
    """The flags that stand behind the colon of one of ours. Raises `ValueError`."""
    return dict(part.split("=", 1) for part in setting.split("+")) if setting else {}


def _program(
    pair: Pair, name: str, setting: str, slo: Slo, upstream: str, extra: dict[str, str], tables: str
) -> Program:
    ready = pair.directory / "guard.json"
    memory = {
        "memory-limit-mib": "0" if name == "rollouts" else str(pair.sizes.memory_mib),
        "serving-kv-bytes-per-token": str(pair.sizes.token_bytes),
        "serving-kv-mib": str(pair.sizes.serving_kv_mib),
    }
    flags = {
        "ready-file": str(ready),
        "die-with-parent": str(os.getpid()),
        "listen": "127.0.0.1:0",
        "upstream": upstream,
        "grant-dir": str(pair.grants),
        "mode": "observe" if name == "observe" else "proxy",
        "ttft-ms": str(1e3 * slo.ttft_s),
        "tpot-ms": str(1e3 * slo.tpot_s),
        **memory,
        **(extra | flags_of(setting) if name in OURS else {}),
    }
    return Program(
        name="guard",
        command=(
            sys.executable,
            "-m",
            _MODULES[name],
            *(part for key, value in flags.items() for part in (f"--{key}", value)),
        ),
        environment={**os.environ, "PYTHONPATH": str(_ROOT), SETTING: setting, TABLES: tables},
        log=pair.directory / f"guard-{name}.log",
        ready_file=ready,
        boot_s=30.0,
        stop_s=10.0,
    )
