"""Real engines for the parts: booted as workers boot them, and asked what they chose."""

import json
import multiprocessing
import os
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, TypeVar

from msgspec.structs import replace

from benchmarks.gpu_parts.harness import PartRun
from benchmarks.gpu_parts.shapes import SMALL, Shape, changed_file, checkpoint, device_bytes, prompts
from ebbtide.rollout_worker.engine.vllm.borrowed_engine import BorrowedEngine
from ebbtide.rollout_worker.engine.vllm.version_updates import ask_ranks
from ebbtide.rollout_worker.engine.vllm.vllm_engine import VllmEngine
from ebbtide.rollout_worker.settings import VllmSettings
from tests.e2e.engine_facts import Asker

#: What rounding in bf16 does to a logprob when a token is computed in another batch, or by another kernel. Networks
#: here say logprobs of a few units, of which bf16 keeps eight bits.
BF16: Final = 0.1
#: The same of float32, on CPUs.
FLOAT32: Final = 1e-3
#: Prompts whose greedy continuations tell two versions apart, and the tokens of each.
ASKED, LENGTH = 8, 32
_EXTENSION: Final = "benchmarks.gpu_parts.engines_told.TellingExtension"
Facts = dict[str, Any]
T = TypeVar("T")


def settings(run: PartRun, **changes: Any) -> VllmSettings:
    """A worker's settings: on a GPU its defaults, so with graphs and compilation; on a CPU what boots in seconds."""
    base = VllmSettings(
        dtype="bfloat16", max_model_len=4096, engine_args=json.dumps({"worker_extension_cls": _EXTENSION})
    )
    if not run.on_gpu:
        # Each engine would have a small function of its sampler compiled: that takes half of its boot.
        os.environ["TORCHDYNAMO_DISABLE"] = "1"
        # In bf16 an engine process ended at its first token on a virtual CPU with AMX.
        base = replace(base, dtype="float32", max_model_len=1024, enforce_eager=True, threads=1, kv_cache_mib=64)
    elif run.small:
        base = replace(base, max_model_len=1024, kv_cache_mib=512)
    return replace(base, **changes)


@asynccontextmanager
async def booted(
    model: Path, slots: int, chosen: VllmSettings, borrowed: BorrowedEngine | None = None
) -> AsyncIterator[tuple[VllmEngine, float]]:
    """An engine, and the seconds until it was ready."""
    engine, began = VllmEngine(str(model), slots, chosen, borrowed), time.monotonic()
    try:
        await engine.start()
        yield engine, time.monotonic() - began
    finally:
        await engine.stop()


async def told(engine: VllmEngine) -> Facts:
    """What vLLM chose, and how it takes new weights."""
    llm = engine._llm  # noqa: SLF001 - nothing else has vLLM's configuration
    config = llm.vllm_config
    (first, *_) = await llm.collective_rpc("ebbtide_chosen")
    reports = await ask_ranks(llm, "report")
    boxes = reports[0][0]
    capacity = engine.capacity
    return {
        **first,
        "async_scheduling": bool(config.scheduler_config.async_scheduling),
        "scheduler": str(config.scheduler_config.scheduler_cls).rpartition(".")[2].strip("'>"),
        "compilation": str(config.compilation_config.mode),
        "graphs": str(config.compilation_config.cudagraph_mode),
        "kv_tokens": capacity.kv_tokens,
        "kv_block": capacity.kv_block,
        "batched_tokens": capacity.batched_tokens,
        "tensors_read": None if boxes is None else len(boxes),
        "obstacle_to_changes_in_place": reports[0][1],
    }


async def greedy(engine: VllmEngine, shape: Shape) -> list[Facts]:
    """Greedy continuations, one after another, so that no other request shares a step."""
    asker = Asker(engine)
    return [await asker.ask(ids, max_tokens=LENGTH) for ids in prompts(ASKED, 24, shape)]


async def checksums(engine: VllmEngine) -> Facts:
    """Digests of the live weights, by parameter."""
    found: Facts = {}
    for one in await engine._llm.compute_weight_checksums():  # noqa: SLF001 - no call of Ebbtide's has it
        found |= one
    return found


def apart(one: Sequence[Facts], other: Sequence[Facts], within: float) -> list[str]:
    """Where two lists of continuations are not those of the same weights; empty: nowhere.

    Rounding may turn a choice between two tokens of about the same logprob; what comes behind is then another text.
    """
    found = list[str]()
    for number, (first, second) in enumerate(zip(one, other, strict=True)):
        for place, (a, b) in enumerate(zip(first["ids"], second["ids"], strict=True)):
            if abs(first["logprobs"][place] - second["logprobs"][place]) > within:
                found.append(
                    f"answer {number}, token {place}: {first['logprobs'][place]} and {second['logprobs'][place]}"
                )
                break
            if a != b:
                break
    return found


def card_bytes() -> int:
    return _elsewhere(device_bytes)


def checkpoint_for(run: PartRun, shape: Shape) -> Path:
    """The checkpoint of `shape`. A process of its own makes it, so that this one, beside its engines, holds no memory
    of the device."""
    return _elsewhere(checkpoint, run.models, shape, run.device)


def changed_file_for(run: PartRun, model: Path, share: float) -> tuple[Path, Path]:
    """Another version of `model` and the file of its changes, made in a process of its own, too."""
    return _elsewhere(changed_file, model, run.folder, share, run.device)


def _elsewhere(work: Callable[..., T], *given: Any) -> T:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(work, *given).result()


def rounding(run: PartRun) -> float:
    """The tolerance for logprobs of engines with the settings of this run."""
    return BF16 if run.on_gpu else FLOAT32


def shape_of(run: PartRun, real: Shape) -> Shape:
    return SMALL if run.small else real
