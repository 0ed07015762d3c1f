"""Measures how soon a person sees the first token of a real engine through a gateway.

    python benchmarks/first_token.py [--requests N] [--prompt N] [--tokens N] [--device cuda] [--hidden N] [--layers N]

Real processes on this machine: Redis that syncs every write, a coordinator, a relay, one worker with a vLLM engine, and
a gateway. A client streams completions, one after another, by HTTP on the loopback. The model has random weights, so
its size and the engine's speed are real, and its text is none. Prints the figures and the conditions that they hold
under, as JSON. `benchmarks/gpu.py` calls it where there is a GPU.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from msgspec import Struct
from msgspec.structs import asdict

ROOT: Final = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT)]  # run as a script, from anywhere

from benchmarks.arguments import count  # noqa: E402 - after the path
from benchmarks.conditions import conditions  # noqa: E402
from benchmarks.control_plane.measures import spread  # noqa: E402
from benchmarks.real_kills.checkpoint import make_checkpoint  # noqa: E402
from ebbtide.cli.chat import GatewayConnection  # noqa: E402
from tests.chaos.cluster import TOKEN, Cluster  # noqa: E402

RUN: Final = "first-token"
#: Ids of characters in the model's tokenizer.
_VOCABULARY: Final = 96
#: Requests that are not counted: the first ones warm caches and connections up.
_UNCOUNTED: Final = 3
_CPU_ENGINE: Final = {"vllm_dtype": "float32", "vllm_enforce_eager": True, "vllm_threads": 1, "vllm_kv_cache_mib": 256}
_BOOT_S: Final = 300.0


class FirstTokenPlan(Struct, frozen=True, kw_only=True):
    """`prompt` and `tokens`: ids of each request's prompt and answer. `hidden`, `layers`: of the model."""

    requests: int = 50
    prompt: int = 64
    tokens: int = 64
    device: str = "cpu"
    hidden: int = 128
    layers: int = 2


async def measure_first_tokens(plan: FirstTokenPlan, directory: Path) -> dict[str, Any]:
    """`first_token_...`, `gap_...` (between two parts of one answer) in ms, and `token_...`, the mean time of
    each later token of an answer. Raises `TimeoutError` if a program does not boot.
    """
    async with _stand(plan, directory) as url:
        seen = await asyncio.to_thread(_stream_all, GatewayConnection(url, TOKEN), plan)
    parts = {"first_token": [one.first_s for one in seen], "token": [one.token_s for one in seen]}
    parts["gap"] = [gap for one in seen for gap in one.gaps_s]
    return {
        f"{name}_{key}": value for name, values in parts.items() for key, value in spread(values, "ms", 1e3).items()
    }


class _Streamed(Struct, frozen=True):
    """One answer, in seconds."""

    first_s: float
    token_s: float
    gaps_s: list[float]


@asynccontextmanager
async def _stand(plan: FirstTokenPlan, directory: Path) -> AsyncIterator[str]:
    """A run with one version, a worker that has it, and the URL of a gateway."""
    from safetensors.torch import load_file

    base = make_checkpoint(directory / "model", 1, hidden_size=plan.hidden, layers=plan.layers)
    cluster = Cluster(directory)
    try:
        client = await cluster.boot(workers=0)
        engine: dict[str, Any] = _CPU_ENGINE if plan.device == "cpu" else {}
        windows: dict[str, Any] = {"flush_tokens": 32, "flush_interval_ms": 250}  # the default ones
        await cluster.worker("w1", engine="vllm", model=base, boot_s=_BOOT_S, **windows, **engine)
        spec = {"name": RUN, "model": str(base), "environment": {"name": "none"}, "trainer": {"name": "external"}}
        await client.submit(spec, RUN)
        async with client.claim(RUN) as lease:
            await lease.publish(load_file(base / "model.safetensors"), step=0)
            coordinator = cluster.process["coordinator"].address
            await cluster.start("gateway", "gateway", listen="127.0.0.1:0", coordinator=coordinator, holder="gateway")
            yield f"http://{cluster.process['gateway'].address}"
    finally:
        await cluster.close()


def _stream_all(gateway: GatewayConnection, plan: FirstTokenPlan) -> list[_Streamed]:
    seen = [_stream(gateway, plan, number) for number in range(_UNCOUNTED + plan.requests)]
    return seen[_UNCOUNTED:]


def _stream(gateway: GatewayConnection, plan: FirstTokenPlan, number: int) -> _Streamed:
    """A prompt of its own, so that no engine has its prefix. Raises `ValueError` for an answer of another length."""
    prompt = [(number * 31 + place * 7 + place * place) % _VOCABULARY for place in range(plan.prompt)]
    body = {"model": RUN, "prompt": prompt, "max_tokens": plan.tokens, "ignore_eos": True, "stream": True}
    began, times, tokens = time.monotonic(), list[float](), 0
    for event in gateway.events("/v1/completions", body | {"return_token_ids": True}):
        if ids := event["choices"][0]["token_ids"]:
            times.append(time.monotonic())
            tokens += len(ids)
    if tokens != plan.tokens:
        raise ValueError(f"an answer has {tokens} tokens, not {plan.tokens}")
    gaps = [after - before for before, after in pairwise(times)]
    later = (times[-1] - times[0]) / max(1, tokens - 1)
    return _Streamed(times[0] - began, later, gaps)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    defaults = FirstTokenPlan()
    for name in ("requests", "prompt", "tokens", "hidden", "layers"):
        parser.add_argument(f"--{name}", type=count, default=getattr(defaults, name))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    plan = FirstTokenPlan(**vars(parser.parse_args()))
    with tempfile.TemporaryDirectory() as folder:
        found = asyncio.run(measure_first_tokens(plan, Path(folder)))
    print(json.dumps({"conditions": conditions(), "plan": asdict(plan), "figures": found}, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
