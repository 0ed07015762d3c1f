"""What an engine does on a device that no CPU build does: graphs, compilation, updates in place, and how close its
logprobs are to the trainer's.
"""

import asyncio
import time
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np
import torch

from benchmarks.gpu_parts.engines import (
    Facts,
    apart,
    booted,
    card_bytes,
    changed_file_for,
    checkpoint_for,
    checksums,
    greedy,
    rounding,
    settings,
    shape_of,
    told,
)
from benchmarks.gpu_parts.harness import PartRun, PartSkipped
from benchmarks.gpu_parts.learning_parts import learning
from benchmarks.gpu_parts.shapes import QWEN3_8B, QWEN3_600M, prompts, release
from ebbtide.rollout_worker.engine.vllm.vllm_engine import VllmEngine
from ebbtide.trainer.learning.network import load_network
from ebbtide.trainer.learning.training_batches import TrainingSample
from tests.e2e.engine_facts import Asker
from tests.support.waiting import wait_until

#: Share of the elements that the installed version changes.
_SHARE: Final = 0.03
#: Bounds beyond which a ratio is clipped, as by default.
_CLIP: Final = 0.2
#: Bytes of a card from which on 8B is tried.
_BIG: Final = 60 << 30


def boot(run: PartRun) -> None:
    """One engine with all defaults."""
    shape = shape_of(run, QWEN3_600M)
    model = checkpoint_for(run, shape)

    async def work() -> None:
        async with booted(model, 64, settings(run)) as (engine, seconds):
            run.tell(boot_s=seconds, **await told(engine))
            began = time.monotonic()
            await greedy(engine, shape)
            run.tell(greedy_s=time.monotonic() - began)

    asyncio.run(work())


def install(run: PartRun) -> None:
    """A version by its changes, by a reload and by a fresh boot makes the same engine; requests in flight go on.

    Raises `ValueError` if one differs.
    """
    shape = shape_of(run, QWEN3_600M)
    model = checkpoint_for(run, shape)
    weights, changes = changed_file_for(run, model, _SHARE)

    async def updated() -> tuple[list[Facts], Facts]:
        async with booted(model, 64, settings(run)) as (engine, _):
            base, first = await greedy(engine, shape), await checksums(engine)
            flying = [
                asyncio.create_task(_long(engine, number, ids)) for number, ids in enumerate(prompts(16, 24, shape))
            ]
            await wait_until(lambda: engine._llm.output_processor.get_num_unfinished_requests() == len(flying))  # noqa: SLF001
            pauses = {"in_place": await engine.install(1, weights, changes)}
            versions = {version for one in flying for version in (await one)["versions"]}
            placed, placed_sums = await greedy(engine, shape), await checksums(engine)
            pauses["back"] = await engine.install(2, model / "model.safetensors")
            back, back_sums = await greedy(engine, shape), await checksums(engine)
            pauses["reload"] = await engine.install(3, weights)
            reloaded, reloaded_sums = await greedy(engine, shape), await checksums(engine)
            run.tell(pauses_s=pauses, versions_in_flight=sorted(versions))
        _check(run, "in place and reloaded", (placed, placed_sums), (reloaded, reloaded_sums))
        _check(run, "base and back", (base, first), (back, back_sums))
        if not apart(base, reloaded, rounding(run)):
            raise ValueError("the update changed nothing")
        return reloaded, reloaded_sums

    def fresh_model() -> Path:
        path = run.folder / "fresh"
        path.mkdir()
        for file in model.iterdir():
            (path / file.name).symlink_to(weights if file.name == "model.safetensors" else file)
        return path

    async def fresh() -> tuple[list[Facts], Facts]:
        async with booted(fresh_model(), 64, settings(run)) as (engine, _):
            return await greedy(engine, shape), await checksums(engine)

    reloaded = asyncio.run(updated())
    _check(run, "reloaded and fresh", reloaded, asyncio.run(fresh()))


def _check(run: PartRun, name: str, one: tuple[list[Facts], Facts], other: tuple[list[Facts], Facts]) -> None:
    """Notes how two engines with the same weights agree. CPU builds pack weights, which says nothing of their bits."""
    same_bits = one[1] == other[1]
    differences = apart(one[0], other[0], rounding(run))
    run.tell(**{name: {"same_bits": same_bits, "apart": differences}})
    if differences or (run.on_gpu and not same_bits):
        raise ValueError(f"{name} differ: {differences[:3] or 'in their bits'}")


async def _long(engine: VllmEngine, number: int, ids: list[int]) -> Facts:
    asker = Asker(engine)
    asker._asked = 1000 * (number + 1)  # noqa: SLF001 - request ids of its own
    return await asker.ask(ids, max_tokens=256)


def install_8b(run: PartRun) -> None:
    """Pauses of a real size. Skipped where the card is too small."""
    shape = shape_of(run, QWEN3_8B)
    if not run.small and card_bytes() < _BIG:
        raise PartSkipped("the card is too small for 8B beside a second version of it")
    model = checkpoint_for(run, shape)
    weights, changes = changed_file_for(run, model, _SHARE)

    async def work() -> None:
        async with booted(model, 64, settings(run)) as (engine, seconds):
            run.tell(boot_s=seconds)
            pauses: Facts = {"in_place": await engine.install(1, weights, changes)}
            run.tell(pauses_s=pauses)
            placed = await greedy(engine, shape)
            pauses["reload"] = await engine.install(2, weights)
            run.tell(pauses_s=pauses)
            if found := apart(placed, await greedy(engine, shape), rounding(run)):
                raise ValueError(f"in place and reloaded differ: {found[:3]}")

    asyncio.run(work())


def mismatch(run: PartRun) -> None:
    """How far an engine's logprobs of what it sampled are from the trainer's, both in bf16 (on CPUs in float32): fresh
    tokens' ratios are taken to the engine's, so this is their error."""
    shape = shape_of(run, QWEN3_600M)
    model = checkpoint_for(run, shape)
    asked, length = (8, 48) if run.small else (64, 256)

    async def sampled() -> list[tuple[list[int], Facts]]:
        async with booted(model, asked, settings(run)) as (engine, _):
            asker, given = Asker(engine), prompts(asked, 24, shape)
            answers = await asker.ask_all(given, temperature=1.0, max_tokens=length)
            return list(zip(given, answers, strict=True))

    run.tell(**_gaps(run, model, asyncio.run(sampled())))


def _gaps(run: PartRun, model: Path, sampled: list[tuple[list[int], Facts]]) -> Facts:
    """Of each token by a plain pass, and the trainer's own report of a step on the same tokens."""
    network, gaps = load_network(model).to(run.device), list[float]()
    with torch.no_grad(), torch.autocast(run.device, torch.bfloat16, enabled=run.on_gpu):
        for ids, answer in sampled:
            made = torch.tensor(answer["ids"], device=run.device)
            logits = network(torch.tensor([[*ids, *answer["ids"]]], device=run.device)).logits[0, len(ids) - 1 : -1]
            found = logits.float().log_softmax(-1).gather(1, made[:, None])[:, 0]
            gaps += (found.cpu() - torch.tensor(answer["logprobs"])).tolist()
    del network
    release(run.device)
    trainer = learning(model, run.device, dtype="bfloat16" if run.on_gpu else "float32", micro_batch_tokens=4096)
    told = asdict(trainer.train([_sample(ids, answer) for ids, answer in sampled], step=0, version=0))
    gap = np.array(gaps)
    ratio = np.exp(gap)
    return {
        "tokens": len(gap),
        "mean_abs": float(np.abs(gap).mean()),
        "p99_abs": float(np.quantile(np.abs(gap), 0.99)),
        # Of the engine's policy to the trainer's, by samples of the former (Schulman 2020, "Approximating KL
        # divergence", estimator k3).
        "kl": float((ratio - 1 - gap).mean()),
        "clipped": float(((ratio < 1 - _CLIP) | (ratio > 1 + _CLIP)).mean()),
        "trainer": {name: value for name, value in told.items() if value is not None},
        "logprob_median": float(median(answer for _, one in sampled for answer in one["logprobs"])),
    }


def _sample(ids: list[int], answer: Facts) -> TrainingSample:
    made: list[Any] = answer["ids"]
    return TrainingSample(
        ids=np.array([*ids, *made], dtype=np.int64),
        mask=np.ones(len(made), dtype=np.bool_),
        logprobs=np.array(answer["logprobs"], dtype=np.float32),
        versions=np.zeros(len(made), dtype=np.int64),
        advantage=1.0,
    )
