"""What the serving-guard's proxy adds to a short streamed request, and how many of them one core passes.

Three processes: an engine that answers each chat with events at once (one write each), the proxy on one core, and the
client with the engine on the others. Direct and proxied requests take turns, so that whatever else the machine
does meets both. Requests per second of the proxy's own processor time (`per_core_s`) holds on a shared machine too.

    python benchmarks/proxy.py [--quick] [--output PATH]
"""

import argparse
import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Self

sys.path[:0] = [str(Path(__file__).parents[1])]  # run as a script, from anywhere

import uvloop  # noqa: E402

from benchmarks import arguments  # noqa: E402
from benchmarks.conditions import conditions  # noqa: E402
from benchmarks.streaming import EVENTS, Asker, Stub  # noqa: E402

#: Between events, so that none of a request come together.
_STEP_S: Final = 0.005


async def _connect(port: int) -> Asker:
    _, asker = await asyncio.get_running_loop().create_connection(Asker, "127.0.0.1", port)
    return asker


async def latencies(direct: int, proxied: int, count: int) -> dict[str, Any]:
    """One request at a time, each way in turns."""
    askers = {"direct": await _connect(direct), "proxied": await _connect(proxied)}
    seen: dict[str, list[tuple[float, float]]] = {"direct": [], "proxied": []}
    for number in range(count + 50):
        for way, asker in askers.items():
            taken = await asker.ask()
            if number >= 50:  # the first ones warm up
                seen[way].append(taken)
    return _compared(seen)


async def paced(direct: int, proxied: int, rate: float, seconds: float) -> dict[str, Any]:
    """Open loop: so many a second, each way for a second in turns; on free connections of a growing pool."""
    pools: dict[str, list[Asker]] = {"direct": [], "proxied": []}
    ports = {"direct": direct, "proxied": proxied}
    seen: dict[str, list[tuple[float, float]]] = {"direct": [], "proxied": []}

    async def one(way: str, due: float) -> None:
        pool = pools[way]
        asker = pool.pop() if pool else await _connect(ports[way])
        late = time.perf_counter() - due
        first, whole = await asker.ask()
        seen[way].append((first + late, whole + late))
        pool.append(asker)

    for turn in range(2 * max(1, round(seconds / 2))):
        way = ("direct", "proxied")[turn % 2]
        begin, tasks = time.perf_counter(), []
        for number in range(round(rate)):
            due = begin + number / rate
            if (wait := due - time.perf_counter()) > 0:
                await asyncio.sleep(wait)
            tasks.append(asyncio.create_task(one(way, due)))
        await asyncio.gather(*tasks)
    return _compared(seen) | {"rate": rate}


async def closed(port: int, pid: int, askers: int, seconds: float) -> dict[str, float]:
    """As many as it takes: so many connections, each asking again at once."""
    done = 0
    end = time.perf_counter() + seconds

    async def one() -> None:
        nonlocal done
        asker = await _connect(port)
        while time.perf_counter() < end:
            await asker.ask()
            done += 1

    before, begin = _cpu_s(pid), time.perf_counter()
    await asyncio.gather(*[one() for _ in range(askers)])
    took, cpu = time.perf_counter() - begin, _cpu_s(pid) - before
    return {"per_s": round(done / took, 1), "per_core_s": round(done / max(cpu, 1e-3), 1), "busy": round(cpu / took, 3)}


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _compared(seen: dict[str, list[tuple[float, float]]]) -> dict[str, Any]:
    """Milliseconds; `added`: the difference of the quantiles."""
    out: dict[str, Any] = {"requests": len(seen["proxied"])}
    for index, what in enumerate(("first_token", "whole")):
        for share in (50, 99):
            direct, proxied = (
                1e3 * sorted(taken[index] for taken in seen[way])[int(len(seen[way]) * share / 100)]
                for way in ("direct", "proxied")
            )
            out[f"{what}_p{share}_ms"] = {
                "direct": round(direct, 3), "proxied": round(proxied, 3), "added": round(proxied - direct, 3)
            }  # fmt: skip
    return out


async def _serve_stub(step_s: float) -> None:
    server = await asyncio.get_running_loop().create_server(lambda: Stub(step_s), "127.0.0.1", 0, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


async def _serve_proxy(upstream: str) -> None:
    from ebbtide.serving_guard.proxy.proxy import Proxy
    from ebbtide.serving_guard.settings import ProxySettings

    proxy = Proxy(ProxySettings(), upstream, Counting(), "127.0.0.1:0")
    await proxy.start()
    print(proxy.address.rpartition(":")[2], flush=True)
    await asyncio.Event().wait()


class Counting:
    """A `Traffic` that does next to nothing."""

    def __init__(self) -> None:
        self.tokens = 0

    def arrived(self, request: str, model: str, prompt_tokens: int, now: float, streamed: bool) -> None: ...

    def ready(self, request: str) -> None:  # noqa: ARG002 - a `Traffic`
        return None

    def produced(self, request: str, tokens: int, now: float) -> None:  # noqa: ARG002 - a `Traffic`
        self.tokens += tokens

    def ended(self, request: str, ok: bool, now: float) -> None: ...


class Part:
    """A process of the benchmark, pinned to its cores; its first line says its port."""

    def __init__(self, cores: set[int], *flags: str) -> None:
        command = [sys.executable, __file__, *flags, "--cores", ",".join(map(str, sorted(cores)))]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None  # noqa: S101
        self.port = int(self.process.stdout.readline())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()


def measure(*, quick: bool) -> dict[str, Any]:
    cores = sorted(os.sched_getaffinity(0))
    own, others = {cores[0]}, set(cores[1:]) or set(cores)
    os.sched_setaffinity(0, others)
    with contextlib.ExitStack() as parts:
        out: dict[str, Any] = {}
        for step_s in (0.0, _STEP_S):
            stub = parts.enter_context(Part(others, "--role", "stub", "--step-s", str(step_s)))
            upstream = f"http://127.0.0.1:{stub.port}"
            proxy = parts.enter_context(Part(own, "--role", "proxy", "--upstream", upstream))
            out |= uvloop.run(_measure(stub, proxy, spaced=step_s > 0, quick=quick))
        return out


async def _measure(stub: Part, proxy: Part, *, spaced: bool, quick: bool) -> dict[str, Any]:
    count, seconds = (1000, 4.0) if quick else (5000, 20.0)
    if spaced:
        return {"spaced_closed_loop": await closed(proxy.port, proxy.process.pid, 128, seconds / 2)}
    out: dict[str, Any] = {"alone": await latencies(stub.port, proxy.port, count)}
    out["at_500_per_s"] = await paced(stub.port, proxy.port, 500.0, seconds)
    out["direct_closed_loop"] = await closed(stub.port, stub.process.pid, 32, seconds / 2)
    out["proxied_closed_loop"] = await closed(proxy.port, proxy.process.pid, 32, seconds / 2)
    return out


def _told(figures: dict[str, Any]) -> str:
    rows = [f"{'':14}{'direct':>10}{'proxied':>10}{'added':>10}  ms"]
    for part in ("alone", "at_500_per_s"):
        rows.append(part.replace("_", " ").replace("per s", "requests/s") + ":")
        for what in ("first_token_p50_ms", "first_token_p99_ms", "whole_p50_ms", "whole_p99_ms"):
            one = figures[part][what]
            name = what.removesuffix("_ms").replace("_", " ")
            rows.append(f"{name:>14}{one['direct']:10.3f}{one['proxied']:10.3f}{one['added']:10.3f}")
    full = figures["proxied_closed_loop"]
    rows.append(
        f"32 clients: {full['per_s']:.0f} requests/s of {EVENTS} events through one core ({full['busy']:.0%} busy: "
        f"{full['per_core_s']:.0f} per second of it); direct {figures['direct_closed_loop']['per_s']:.0f}/s"
    )
    spaced = figures["spaced_closed_loop"]
    rows.append(
        f"events {_STEP_S * 1e3:.0f} ms apart, 128 clients: {spaced['per_s']:.0f} requests/s at "
        f"{spaced['busy']:.0%} of the core ({spaced['per_core_s']:.0f} per second of it)"
    )
    return "\n".join(rows)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="in 15 seconds")
    parser.add_argument("--output", type=arguments.output)
    parser.add_argument("--role", choices=("stub", "proxy"), help=argparse.SUPPRESS)
    parser.add_argument("--upstream", help=argparse.SUPPRESS)
    parser.add_argument("--cores", help=argparse.SUPPRESS)
    parser.add_argument("--step-s", type=float, default=0.0, help=argparse.SUPPRESS)
    given = parser.parse_args(argv)
    given.output = given.output or arguments.result("proxy", quick=given.quick)
    if given.role:
        os.sched_setaffinity(0, {int(core) for core in given.cores.split(",")})
        uvloop.run(_serve_stub(given.step_s) if given.role == "stub" else _serve_proxy(given.upstream))
        return
    where = conditions()  # before this process keeps to some of the cores
    measured = measure(quick=given.quick)
    figures = {
        "proxy_overhead_p50_ms": measured["alone"]["first_token_p50_ms"]["added"],
        "proxy_overhead_p99_ms": measured["alone"]["first_token_p99_ms"]["added"],
        "requests_per_s": measured["proxied_closed_loop"]["per_s"],
        "requests_per_core_s": measured["proxied_closed_loop"]["per_core_s"],
        "requests_per_core_s_spaced": measured["spaced_closed_loop"]["per_core_s"],
    }
    print(_told(measured))
    out = {"conditions": where, "quick": given.quick, "figures": figures, "measured": measured}
    given.output.write_text(json.dumps(out, indent=2) + "\n")


if __name__ == "__main__":
    main()
