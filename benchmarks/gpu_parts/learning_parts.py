"""What the trainer costs on a device: passes, memory, optimiser steps, checkpoints. It is called as runs call it, by a
spec, so what a run would do by its defaults is what is measured.
"""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, Final
from xml.etree import ElementTree as ET

import msgspec
import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu_parts.harness import ROOT, PartRun
from benchmarks.gpu_parts.publishing_parts import WeightPath
from benchmarks.gpu_parts.shapes import QWEN3_600M, QWEN3_1700M, SMALL, Shape, checkpoint, release, settle
from ebbtide.trainer.learning.local_learning import LocalLearning
from ebbtide.trainer.learning.trainer_memory import CudaRoom, TrainerMemory
from ebbtide.trainer.learning.training_batches import TrainingSample
from ebbtide.trainer.training_checkpoint import TrainingState
from ebbtide.types.run import RunSpec

#: Lengths of one sample that is a micro-batch.
LENGTHS: Final = (2048, 4096, 8192, 16384)
SMALL_LENGTHS: Final = (64, 128)
#: Dense bf16 operations a second without sparsity, by NVIDIA's data sheets; substrings of device names.
PEAKS: Final = {"H200": 989e12, "H100 PCIe": 756e12, "H100": 989e12, "A100": 312e12, "B200": 2250e12, "L40S": 362e12}
#: Passes that are measured behind one that is not.
_PASSES: Final = 2
#: The default rate of runs.
_RATE: Final = 1e-6
_STEPS: Final = 6
#: Elements of float32 that a trainer moves off its device: the state of an optimiser of 125 M parameters.
_MOVED: Final = 250_000_000
#: Bytes that no device has free: the trainer's memory always leaves it.
_MORE_THAN_ANY: Final = 10**15
#: Tests that run on a GPU where there is one, and need nothing but torch and transformers.
CUDA_TESTS: Final = (
    "tests/unit/trainer/learning/test_learner.py",
    "tests/unit/trainer/learning/test_streamed_gradients.py",
    "tests/unit/trainer/learning/test_gpu_changes.py",
    "tests/unit/trainer/learning/test_trainer_memory.py",
)


def learning(source: Path, device: str, **trainer: Any) -> LocalLearning:
    """A training of the checkpoint `source`, with these fields of the spec's `trainer`."""
    body = {"name": "gpu", "model": str(source), "environment": {"name": "agents"}, "trainer": trainer}
    return LocalLearning(msgspec.convert(body, RunSpec), source=source, device=device)


def sample(shape: Shape, tokens: int, seed: int, advantage: float = 1.0) -> TrainingSample:
    """One of `tokens` random ids, an eighth of them the prompt; its policy was nearly uniform."""
    response, random = tokens - tokens // 8, np.random.default_rng(seed)
    return TrainingSample(
        ids=random.integers(0, shape.vocabulary, tokens, dtype=np.int64),
        mask=np.ones(response, dtype=np.bool_),
        logprobs=np.full(response, -np.log(shape.vocabulary), dtype=np.float32),
        versions=np.zeros(response, dtype=np.int64),
        advantage=advantage,
    )


def passes(run: PartRun) -> None:
    """Forward and backward of one sample that fills a micro-batch, with the optimiser's state on the device."""
    for dtype in ("bfloat16", "float32"):
        for shape in (SMALL,) if run.small else (QWEN3_600M, QWEN3_1700M):
            with _out_of_memory() as full:
                _passes_of(run, shape, dtype)
            if full:
                run.tell(**{f"{shape.name} {dtype}": {"out_of_memory": full[0]}})
            release(run.device)


def _passes_of(run: PartRun, shape: Shape, dtype: str) -> None:
    lengths = SMALL_LENGTHS if run.small else LENGTHS
    source = checkpoint(run.models, shape, run.device)
    one = learning(source, run.device, dtype=dtype, micro_batch_tokens=lengths[-1])
    _pass(one, shape, lengths[0])
    one.update()  # makes the optimiser's state
    facts: dict[str, Any] = {"attention": attention_calls(lambda: _pass(one, shape, lengths[0]))}
    facts |= {"state_bytes": torch.cuda.memory_allocated() if run.on_gpu else None, "lengths": {}}
    for length in lengths:
        facts["lengths"][str(length)] = found = timed_pass(run, one, shape, length)
        run.tell(**{f"{shape.name} {dtype}": facts})
        if "out_of_memory" in found:
            return


def timed_pass(run: PartRun, one: LocalLearning, shape: Shape, length: int) -> dict[str, Any]:
    """Peak bytes, tokens a second, and the share of the card's bf16 operations a second (MFU)."""
    if run.on_gpu:
        torch.cuda.reset_peak_memory_stats()
    times = list[float]()
    with _out_of_memory() as full:
        for number in range(_PASSES + 1):
            took = _seconds(lambda: _pass(one, shape, length), run.device)
            times += [took] if number else []
    if full:
        return {"out_of_memory": full[0]}
    seconds = median(times)
    peak = next((ops for name, ops in PEAKS.items() if run.on_gpu and name in torch.cuda.get_device_name()), None)
    return {
        "seconds": seconds,
        "tokens_per_s": length / seconds,
        "mfu": shape.training_flops(length) / seconds / peak if peak else None,
        "peak_bytes": torch.cuda.max_memory_allocated() if run.on_gpu else None,
    }


def attention_calls(work: Callable[[], object]) -> list[str]:
    """The attention operators that torch called, forward and backward: which of them, hangs on type and mask."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        work()
    return sorted({one.key for one in seen.key_averages() if "attention" in one.key or "flash" in one.key})


def _pass(one: LocalLearning, shape: Shape, length: int) -> None:
    one.accumulate([sample(shape, length, length)], version=0)


def steps(run: PartRun) -> None:
    """Steps of AdamW at the default rate: which share of the published bf16 elements changes, and the patch's bytes.

    Adam's steps have the size of the rate whatever the gradients are; the weights are drawn as wide as trained ones.
    """
    shape, length = (SMALL, 64) if run.small else (QWEN3_600M, 1024)
    one = learning(checkpoint(run.models, shape, run.device), run.device, dtype="bfloat16", learning_rate=_RATE)
    samples = [sample(shape, length, number, 1.0 if number % 2 else -1.0) for number in range(8)]
    path = WeightPath(run.device)
    path.publish(one.tensors())
    before = {name: tensor.clone() for name, tensor in one.tensors()}
    found = list[dict[str, float]]()
    for number in range(_STEPS):
        took = _seconds(lambda: one.train(samples, step=number, version=number), run.device)  # noqa: B023
        changed = counted_changes(before, dict(one.tensors()))
        found.append({"step_s": took, **changed, "patch_bytes": path.publish(one.tensors())[1]["patch_bytes"]})
        run.tell(elements=sum(tensor.numel() for tensor in before.values()), steps=found)


def counted_changes(before: dict[str, Tensor], after: dict[str, Tensor]) -> dict[str, float]:
    """Shares: of elements that differ, and of tensors of which more than a fifth does; `before` becomes `after`."""
    different, dense = 0, 0
    for name, tensor in after.items():
        count = int((tensor != before[name]).sum())
        different, dense = different + count, dense + (count > tensor.numel() / 5)
        before[name].copy_(tensor)
    whole = sum(tensor.numel() for tensor in before.values())
    return {"changed": different / whole, "dense_tensors": dense / len(before)}


def memory(run: PartRun) -> None:
    """GB/s at which an optimiser's state leaves the device for pinned memory of the host, and comes back.

    `out_first` is the first time, when that memory is made. Raises `ValueError` if a bit has changed.
    """
    elements, rounds = 1 << 20 if run.small else _MOVED, 5
    state = [torch.randn(elements // 4, device=run.device) for _ in range(4)]
    before, size = [one.clone() for one in state], sum(one.nbytes for one in state)
    held, out, back = TrainerMemory(lambda: state, CudaRoom(run.device)), list[float](), list[float]()
    for _ in range(rounds + 1):
        out.append(_seconds(lambda: held.give_up(_MORE_THAN_ANY), run.device))
        back.append(_seconds(held.restore, run.device))
    if not all(torch.equal(one, other) for one, other in zip(before, state, strict=True)):
        raise ValueError("what came back is not what went")
    found = {"out_first": out[0], "out": median(out[1:]), "back": median(back)}
    run.tell(bytes=size, gb_per_s={name: size / seconds / 1e9 for name, seconds in found.items()})


def checkpoints(run: PartRun) -> None:
    """Seconds and bytes of a checkpoint, written and read. Raises `ValueError` if what was read is not what was
    written."""
    shape = SMALL if run.small else QWEN3_600M
    one = learning(checkpoint(run.models, shape, run.device), run.device, dtype="bfloat16")
    one.train([sample(shape, 64, 1), sample(shape, 64, 2, -1.0)], step=0, version=0)
    state = TrainingState(run_id="gpu", lineage="gpu", step=1, version=1)
    began = time.perf_counter()
    path = one.checkpoint(run.folder, state, keep=1)
    write_s = time.perf_counter() - began
    size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    run.tell(bytes=size, bytes_per_parameter=size / shape.parameters, write_s=write_s)
    before = {name: tensor.cpu().clone() for name, tensor in one.tensors()}
    one = None  # type: ignore[assignment]
    release(run.device)
    began = time.perf_counter()
    again = learning(path, run.device, dtype="bfloat16")
    again.resume(path, run_id="gpu")
    run.tell(read_s=time.perf_counter() - began)
    if not all(torch.equal(tensor.cpu(), before[name]) for name, tensor in again.tensors()):
        raise ValueError("a checkpoint did not bring the weights back")


def cuda_tests(run: PartRun) -> None:
    """The unit tests that use a GPU where there is one. Raises `ValueError` if one fails, or if none ran."""
    # Their own fixtures alone: those of all tests start services, which this half does without.
    alone = ["-c", "/dev/null", "--rootdir", str(ROOT), "--confcutdir", "tests/unit/trainer/learning"]
    run_tests(run, CUDA_TESTS, *alone, "--import-mode=importlib", "-k", "cuda or gpu")


def run_tests(run: PartRun, tests: Sequence[str], *options: str) -> None:
    """Runs tests by pytest and tells how they ended. Raises `ValueError` if one failed, or if none passed."""
    report = run.folder / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *options, *tests]
    subprocess.run(command, cwd=ROOT, check=False)
    cases = ET.parse(report).getroot().iter("testcase")  # noqa: S314 - our own test runner's file
    found = [(case.get("name") or "", outcome(case)) for case in cases]
    ended = {kind: [name for name, one in found if one == kind] for kind in ("passed", "skipped", "failure", "error")}
    run.tell(**{kind: names if kind in {"failure", "error"} else len(names) for kind, names in ended.items()})
    if ended["failure"] or ended["error"] or not ended["passed"]:
        raise ValueError("tests failed, or none passed")


def outcome(case: ET.Element) -> str:
    return next((kind for kind in ("failure", "error", "skipped") if case.find(kind) is not None), "passed")


def _seconds(work: Callable[[], object], device: str) -> float:
    settle(device)
    start = time.perf_counter()
    work()
    settle(device)
    return time.perf_counter() - start


@contextmanager
def _out_of_memory() -> Iterator[list[str]]:
    """Collects the text of an out-of-memory error, whatever it was wrapped in, and lets all others pass."""
    texts = list[str]()
    try:
        yield texts
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, torch.OutOfMemoryError):
            cause = cause.__cause__ or cause.__context__
        if cause is None:
            raise
        texts.append(str(error).splitlines()[0])
