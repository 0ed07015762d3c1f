"""Runs what needs a GPU, where there is one: the trainer's step on it, and a real engine of vLLM's ordinary wheel; and
measures how fast weight patches are made of tensors on it, how long publishing them holds the trainer up, how soon a
person sees the first token of an engine on it through a gateway (`benchmarks/first_token.py` does it on CPUs), and how
soon an engine's and a trainer's memory leaves the device and comes back.

    python benchmarks/gpu.py

Prints tables and writes `benchmarks/results/gpu.json`. Ends with 1 if a check failed, with 2 where there is no GPU.
"""

import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any
from xml.etree import ElementTree as ET

import numpy as np
import torch

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT)]  # run as a script, from anywhere

from benchmarks.arguments import result  # noqa: E402 - after the path
from benchmarks.first_token import FirstTokenPlan, measure_first_tokens  # noqa: E402 - after the path
from benchmarks.patches.synthetic import rate_for, step  # noqa: E402
from benchmarks.real_kills.checkpoint import make_checkpoint  # noqa: E402
from ebbtide.client.publisher.tensor_snapshots import TensorSnapshot  # noqa: E402
from ebbtide.errors import EbbtideError  # noqa: E402
from ebbtide.trainer.learning.gpu_changes import KeptTensor, KeptTensors, find_changes  # noqa: E402
from ebbtide.trainer.learning.trainer_memory import CudaRoom, TrainerMemory  # noqa: E402
from ebbtide.types.weights import TILE_BYTES  # noqa: E402
from ebbtide.weights.patch import TileCodec  # noqa: E402
from ebbtide.weights.version_encoding import Found  # noqa: E402
from tests.e2e.facts import facts_of  # noqa: E402

CHECKS = (
    "tests/unit/trainer/learning/test_learner.py",
    "tests/unit/trainer/learning/test_streamed_gradients.py",
    "tests/unit/trainer/learning/test_gpu_changes.py",
    "tests/unit/trainer/learning/test_learning.py",
    "tests/unit/trainer/learning/test_trainer_memory.py",
    "tests/e2e/test_vllm_engine.py",
    "tests/e2e/test_vllm_sleep.py",
    "tests/integration/trainer/test_ranks_equal.py",  # two ranks on GPUs, where there are two
)
#: Elements of bf16 that are encoded, and the share of them that changed.
ELEMENTS, DENSITY = 100_000_000, 0.03
#: Elements of float32 that a trainer moves off its device: the state of an optimiser of 125 M parameters.
MOVED = 250_000_000
#: Bytes that no device has free: the trainer's memory always leaves it.
_MORE_THAN_ANY = 10**15
#: A model whose step takes about as long as the path to its reader, so that neither hides the other.
FIRST_TOKEN = FirstTokenPlan(device="cuda", requests=200, hidden=2048, layers=16)


def run_checks(report: Path) -> list[dict[str, Any]]:
    """Name, seconds and outcome of each test."""
    subprocess.run([sys.executable, "-m", "pytest", "-q", f"--junitxml={report}", *CHECKS], cwd=ROOT, check=False)
    cases = ET.parse(report).getroot().iter("testcase")  # noqa: S314 - our own test runner's file
    return [
        {"name": case.get("name"), "seconds": float(case.get("time", 0)), "outcome": outcome(case)} for case in cases
    ]


def outcome(case: ET.Element) -> str:
    return next((kind for kind in ("failure", "error", "skipped") if case.find(kind) is not None), "passed")


def made_pair(device: str, elements: int) -> tuple[torch.Tensor, torch.Tensor]:
    """bf16, and it after a step that changed `DENSITY` of it."""
    spread = 0.02
    pair = step(elements, spread, rate_for(DENSITY, [spread]), 9)
    base, new = (torch.from_numpy(units.view(np.int16)).view(torch.bfloat16).to(device) for units in pair)
    return base, new


def patch_speeds(device: str, base: torch.Tensor, new: torch.Tensor, rounds: int = 7) -> dict[str, Any]:
    """GB/s of dense bytes (medians over rounds that do all): a copy on the device, and one to pinned memory of the
    host; comparison and compaction alone; and the whole encoding, whose coding one core of the host does."""
    there, here = torch.empty_like(new), torch.empty(new.numel(), dtype=new.dtype, pin_memory=device != "cpu")
    old, young = base.view(torch.int16), new.view(torch.int16)
    kept, versions = KeptTensor(base), [base, new]
    works: dict[str, Callable[[], object]] = {
        "copy_on_device": lambda: there.copy_(new),
        "copy_to_host": lambda: here.copy_(new),
        "find_changes": lambda: find_changes(old, young, TILE_BYTES // 2),
        "encode": lambda: encode(kept, versions, here.view(torch.uint8).numpy()),
    }
    times: dict[str, list[float]] = {name: [] for name in works}
    for index in range(rounds + 1):  # the first compiles, and makes allocations that later ones reuse
        for name, work in works.items():
            seconds = _seconds(work, device)
            times[name] += [seconds] if index else []
    found = {name: new.nbytes / median(values) / 1e9 for name, values in times.items()}
    over = {f"{name}_over_copy_on_device": found[name] / found["copy_on_device"] for name in ("find_changes", "encode")}
    return {"elements": new.numel(), "density": DENSITY, "gb_per_s": found, **over}


def encode(kept: KeptTensor, versions: list[torch.Tensor], into: np.ndarray[Any, np.dtype[np.uint8]]) -> int:
    """Bytes of the patch to the version that is not the kept one's; digests are not in it."""
    versions.reverse()
    kept.follow(versions[0])
    found, codec = kept.fetch(into), TileCodec(2)
    units = (min(TILE_BYTES, len(into) - number * TILE_BYTES) // 2 for number in range(len(found)))
    patches = [
        codec.encode_changes(*changes, size) for changes, size in zip(found, units, strict=True) if changes is not None
    ]
    return sum(len(patch) for patch in patches if patch is not None)


def publishing(device: str, base: torch.Tensor, new: torch.Tensor, rounds: int = 7) -> dict[str, dict[str, float]]:
    """How long the trainer is held up by a version, seconds until its bits are on the host, and bytes that came over
    the bus: all of it copied, and with the last version kept on the device. Medians of versions after the second.

    Raises `ValueError` if the bits on the host are not those of the tensor.
    """
    versions, results = [base, new], dict[str, dict[str, float]]()
    for way in ("copied", "kept"):
        snapshots, taken = [TensorSnapshot(), TensorSnapshot()], list[tuple[float, float, float]]()
        for number in range(rounds + 2):
            snapshot, before, weights = snapshots[number % 2], snapshots[1 - number % 2], {"w": versions[number % 2]}
            snapshot.follow(before.give_up())
            began = time.perf_counter()
            snapshot.take(KeptTensors(weights.items, device) if way == "kept" else weights)
            pause = time.perf_counter() - began
            found = snapshot.fetch()[0]
            taken.append((pause, time.perf_counter() - began, float(crossed(found, base.nbytes))))
        on_host = torch.frombuffer(bytearray(snapshot.tensors[0].data), dtype=torch.int16)
        if not torch.equal(on_host, weights["w"].view(torch.int16).cpu()):
            raise ValueError(f"the bits on the host are not the tensor's, {way}")
        names = ("pause_s", "seconds", "bytes")
        results[way] = {name: median(values) for name, values in zip(names, zip(*taken[2:], strict=True), strict=True)}
    return results


def crossed(found: Found | None, size: int) -> int:
    """Bytes that came to the host for a tensor of `size` bytes."""
    if found is None:
        return size
    whole = sum(min(TILE_BYTES, size - at * TILE_BYTES) for at, changes in enumerate(found) if changes is None)
    return whole + sum(array.nbytes for changes in found if changes is not None for array in changes)


def memory_moves(device: str, elements: int, rounds: int = 5) -> dict[str, float]:
    """GB/s at which an optimiser's state leaves the device for pinned memory of the host, and comes back.

    `out_first` is the first time, when that memory is made; the others are medians of later times. Raises `ValueError`
    if a bit has changed."""
    state = [torch.randn(elements // 4, device=device) for _ in range(4)]
    before, size = [one.clone() for one in state], sum(one.nbytes for one in state)
    memory, out, back = TrainerMemory(lambda: state, CudaRoom(device)), list[float](), list[float]()
    for _ in range(rounds + 1):
        out.append(_seconds(lambda: memory.give_up(_MORE_THAN_ANY), device))
        back.append(_seconds(memory.restore, device))
    if not all(torch.equal(one, other) for one, other in zip(before, state, strict=True)):
        raise ValueError("what came back is not what went")
    found = {"out_first": out[0], "out": median(out[1:]), "back": median(back)}
    return {name: size / seconds / 1e9 for name, seconds in found.items()}


def sleeps(directory: Path) -> list[dict[str, Any]] | str:
    """Bytes that a borrowed engine gives back at each level of sleep, and the seconds of both ways; or what failed."""
    model = make_checkpoint(directory / "model", 1, hidden_size=FIRST_TOKEN.hidden, layers=FIRST_TOKEN.layers)
    try:
        facts = facts_of("sleep_facts", model, directory / "worker.page", within_s=560)
    except (subprocess.SubprocessError, ValueError) as error:
        return str(error)
    return [{name: one[name] for name in ("level", "freed", "down_s", "up_s")} for one in facts["sleeps"]]


def first_tokens() -> dict[str, Any]:
    """The figures, or why there are none: the other measurements stand without them."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            return asyncio.run(measure_first_tokens(FIRST_TOKEN, Path(folder)))
        except (EbbtideError, TimeoutError, ValueError) as error:
            return {"failed": str(error)}


def _seconds(work: Callable[[], object], device: str) -> float:
    def settle() -> None:
        if device != "cpu":
            torch.cuda.synchronize()

    settle()
    start = time.perf_counter()
    work()
    settle()
    return time.perf_counter() - start


def main() -> int:
    if not torch.cuda.is_available():
        print("torch sees no CUDA device here", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        checks = run_checks(Path(folder) / "report.xml")
        slept = sleeps(Path(folder))
    first = first_tokens()  # before this process takes memory of the device
    pair = made_pair("cuda", ELEMENTS)
    speeds, pauses = patch_speeds("cuda", *pair), publishing("cuda", *pair)
    device = torch.cuda.get_device_name()
    moves = memory_moves("cuda", MOVED)
    told = {"device": device, "checks": checks, "patches": speeds, "publishing": pauses, "first_token": first}
    told |= {"sleeps": slept, "memory_moves_gb_per_s": moves}
    result("gpu").write_text(json.dumps(told, indent=2))
    print(f"on {device}, {ELEMENTS * 2 / 1e6:.0f} MB of bf16, {DENSITY:.0%} of it changed")
    for check in checks:
        print(f"{check['outcome']:8} {check['seconds']:8.1f} s  {check['name']}")
    for name, value in speeds["gb_per_s"].items():
        print(f"{name:16} {value:8.1f} GB/s")
    for way, found in pauses.items():
        pause, whole = (1e3 * found[name] for name in ("pause_s", "seconds"))
        print(f"published, {way}: {pause:.1f} ms pause, {whole:.1f} ms to the host, {found['bytes'] / 1e6:.1f} MB")
    print(f"through a gateway: {first}")
    print(f"a borrowed engine's sleep: {slept}")
    print("a trainer's memory: " + ", ".join(f"{name} {value:.1f} GB/s" for name, value in moves.items()))
    failed = "failed" in first or isinstance(slept, str)
    return int(failed or any(check["outcome"] in {"failure", "error"} for check in checks))


if __name__ == "__main__":
    sys.exit(main())
