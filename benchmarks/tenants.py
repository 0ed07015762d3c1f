"""What one user's calls take while another user is at a limit, beside what they take alone.

    python benchmarks/tenants.py [--quick] [--rounds N] [--seconds S] [--kinds KIND ...] [--out PATH]

The real coordinator, Redis and gRPC, each a process. One user works: submits rollouts, has their tokens stored, and
reads results. The other drives one limit at a time from a process at the lowest priority, so that the load's own work
takes little from what is measured. Both are measured in turns: alone, beside the first kind, alone, beside the second.

Prints a table and writes a JSON file with `figures`: for each kind the p50 and p99 beside the other user over those
alone. Ends with 1 if a ratio is above what is promised.
"""

import argparse
import asyncio
import json
import secrets
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import uvloop
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

ROOT: Final = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT)]  # run as a script, from anywhere

from benchmarks import arguments  # noqa: E402 - after the path
from benchmarks.conditions import conditions  # noqa: E402
from benchmarks.control_plane.house import House  # noqa: E402
from benchmarks.control_plane.measures import percentile  # noqa: E402
from benchmarks.tenancy.abuse import KINDS, RUDE, RUN  # noqa: E402
from benchmarks.tenancy.calls import TOKEN  # noqa: E402
from benchmarks.tenancy.probe import WORKER_TOKEN  # noqa: E402
from ebbtide.auth.role_tokens import mint  # noqa: E402
from ebbtide.auth.roles import Role  # noqa: E402
from ebbtide.auth.security import ClientSecurity  # noqa: E402
from ebbtide.rpc.channel import open_channel  # noqa: E402
from ebbtide.v1 import runs_pb2, types_pb2  # noqa: E402
from ebbtide.v1.runs_pb2_grpc import RunsStub  # noqa: E402
from tests.support.waiting import wait_until  # noqa: E402

#: What is promised: the other user's figures over its figures alone.
PROMISED: Final = {"p50": 1.2, "p99": 2.0}
_DAY_S: Final = 86_400.0
_LIMIT_S: Final = 120.0

Times = dict[str, list[float]]


class Block(House):
    """A coordinator that knows its users by their tokens, the user who works, and at times the other one."""

    def __init__(self) -> None:
        self._key = Ed25519PrivateKey.generate()
        super().__init__()
        keys = self.redis.directory / "users.pem"
        keys.write_bytes(self._key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
        self._environment = {"EBBTIDE_TOKEN_KEYS": str(keys)}

    def _token(self, role: Role, name: str) -> str:
        return mint(self._key, role, ttl_s=_DAY_S, name=name)

    async def _start(self) -> None:
        self._stack.enter_context(self.redis)
        self.address, self.coordinator = await self._coordinator("coordinator", **self._environment)
        tokens = {TOKEN: self._token(Role.TRAINER, "worker-bee"), WORKER_TOKEN: self._token(Role.WORKER, "fleet")}
        self._probe = await self._process(
            "benchmarks.tenancy.probe",
            self.address,
            environment=tokens,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            limit=1 << 28,
        )
        await _ready(self._probe)
        channel = open_channel(self.address, ClientSecurity(token=self._token(Role.OPERATOR, "operator")))
        self._stack.push_async_callback(channel.close)
        self._runs: Any = RunsStub(channel)

    async def measure(self, seconds: float) -> Times:
        if self._probe.stdin is None or self._probe.stdout is None:
            raise RuntimeError("the user who works has no pipes")
        self._probe.stdin.write(f"{seconds}\n".encode())
        line = await self._probe.stdout.readline()
        if not line:
            raise RuntimeError("the user who works ended; its output says why")
        found: Times = json.loads(line)
        return found

    async def beside(self, kind: str, seconds: float) -> Times:
        """What the user who works measures while the other one is at a limit."""
        tokens = {TOKEN: self._token(Role.TRAINER, f"greedy-{secrets.token_hex(4)}")}
        abuser = await self._process(
            "benchmarks.tenancy.abuse", kind, self.address, environment=tokens, stdout=subprocess.PIPE
        )
        try:
            async with asyncio.timeout(_LIMIT_S):
                await _ready(abuser)
            await asyncio.sleep(0.5)
            found = await self.measure(seconds)
            if abuser.returncode is not None:
                raise RuntimeError(f"the other user ({kind}) ended; its output says why")
        finally:
            if abuser.returncode is None:
                abuser.kill()
                await abuser.wait()
        await self._clear()
        return found

    async def _clear(self) -> None:
        """End the other user's runs, and wait until their data is deleted."""

        async def live() -> list[str]:
            request = runs_pb2.ListRunsRequest()
            runs = (await self._runs.ListRuns(request, timeout=30)).runs
            over = (types_pb2.RUN_STATUS_FINISHED, types_pb2.RUN_STATUS_FAILED, types_pb2.RUN_STATUS_CANCELLED)
            return [one.run_id for one in runs if one.run_id.startswith(RUN) and one.status not in over]

        for run_id in await live():
            await self._runs.CancelRun(runs_pb2.CancelRunRequest(run_id=run_id), timeout=60)

        def swept() -> bool:
            found = self.redis.command(
                "EVAL", "return #redis.call('KEYS', 'ebbtide:{' .. ARGV[1] .. '*rollout:*')", "0", RUN
            )
            return found.strip() == b":0"

        await wait_until(swept, timeout=120, interval=0.2, what="the other user's data is deleted")


async def _ready(process: asyncio.subprocess.Process) -> None:
    if process.stdout is None or (await process.stdout.readline()).strip() != b"READY":
        raise RuntimeError("a program of the benchmark did not start; its output says why")


def compared(alone: Mapping[str, Sequence[float]], beside: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Milliseconds alone and beside, and their ratio, of each operation."""
    found: dict[str, Any] = {}
    for what in sorted(alone):
        one: dict[str, Any] = {"samples": [len(alone[what]), len(beside.get(what, ()))]}
        for name, share in (("p50", 0.5), ("p99", 0.99)):
            before, after = percentile(alone[what], share), percentile(beside[what], share)
            one |= {f"{name}_alone_ms": round(before * 1e3, 2), f"{name}_ms": round(after * 1e3, 2)}
            one[f"{name}_ratio"] = round(after / before, 3)
        found[what] = one
    return found


def figures(alone: Mapping[str, Times], beside: Mapping[str, Times]) -> dict[str, Any]:
    """For each kind its operations and the worst ratios among them."""
    kinds = {}
    for kind in beside:
        operations = compared(alone[kind], beside[kind])
        worst = {f"{p}_ratio": max(one[f"{p}_ratio"] for one in operations.values()) for p in PROMISED}
        kinds[kind] = {**worst, "backs_off": kind not in RUDE, "operations": operations}
    return {
        "kinds": kinds,
        **{f"worst_{p}_ratio": max(one[f"{p}_ratio"] for one in kinds.values()) for p in PROMISED},
    }


def table(found: Mapping[str, Any]) -> str:
    columns = "   ".join(f"{p + ' ms':>8} {'beside':>8} {'ratio':>6}" for p in PROMISED)
    lines = [f"{'kind':10} {'operation':12} {columns}"]
    for kind, one in found["kinds"].items():
        for what, row in one["operations"].items():
            parts = [f"{row[f'{p}_alone_ms']:8.2f} {row[f'{p}_ms']:8.2f} {row[f'{p}_ratio']:6.2f}" for p in PROMISED]
            lines.append(f"{kind:10} {what:12} {'   '.join(parts)}")
    worst = ", ".join(f"{p} {found[f'worst_{p}_ratio']:.2f} (promised {most:g})" for p, most in PROMISED.items())
    return "\n".join([*lines, f"worst ratios: {worst}"])


async def measure(kinds: Sequence[str], rounds: int, seconds: float) -> dict[str, Any]:
    alone: dict[str, Times] = defaultdict(lambda: defaultdict(list))
    beside: dict[str, Times] = defaultdict(lambda: defaultdict(list))
    async with Block() as block:
        for number in range(rounds):
            for kind in kinds:
                for into, times in (
                    (alone, await block.measure(seconds)),
                    (beside, await block.beside(kind, seconds)),
                ):
                    for what, values in times.items():
                        into[kind][what] += values
                print(f"round {number + 1}: {kind}", flush=True)
    return figures(alone, beside)


def main() -> int:
    parser = argparse.ArgumentParser(description="One user's latency beside another user at a limit.")
    parser.add_argument("--quick", action="store_true", help="one round of 5 s each, in 3 minutes")
    parser.add_argument("--rounds", type=arguments.count, default=4)
    parser.add_argument("--seconds", type=arguments.factor, default=10.0, help="of each measurement")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--out", type=arguments.output, help="the JSON file")
    options = parser.parse_args()
    options.out = options.out or arguments.result("tenants", quick=options.quick)
    rounds, seconds = (1, 5.0) if options.quick else (options.rounds, options.seconds)
    found = uvloop.run(measure(options.kinds, rounds, seconds))
    print(table(found))
    setup = {"rounds": rounds, "seconds": seconds, "promised": PROMISED, "niceness_of_the_other_user": 19}
    options.out.write_text(json.dumps({"figures": found, "setup": setup, "conditions": conditions()}, indent=1) + "\n")
    return 0 if all(found[f"worst_{p}_ratio"] <= most for p, most in PROMISED.items()) else 1


if __name__ == "__main__":
    sys.exit(main())
