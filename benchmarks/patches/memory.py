"""What encoding and applying take beyond the two versions, as the kernel counts it, in a process of its own.

    python -m benchmarks.patches.memory ELEMENTS

Prints a line of JSON. The patch counts, held whole, though a sender that streams holds one tile of it; so does all that
a codec allocates. What the process takes anyway (the interpreter, the libraries, kernels once compiled) is told apart.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.patches.speeds import SPREAD
from benchmarks.patches.synthetic import rate_for, step
from ebbtide.types.weights import TILE_BYTES
from ebbtide.weights.patch.alphabet import Array
from ebbtide.weights.patch.tile_codec import TileCodec, warm_up

ROOT = Path(__file__).parents[2]


def memory(elements: int) -> dict[str, Any]:
    """Peak bytes beyond both versions of `elements` of bf16, 3 % of them changed; measured in another process."""
    words = [sys.executable, "-m", "benchmarks.patches.memory", str(elements)]
    # What was freed goes back at once (mallopt(3)): else what encoding took would hide what applying takes.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"}
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def resident(field: str) -> int:
    """Bytes that this process has in memory: `VmRSS` now, `VmHWM` at most since the peak was reset."""
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    if found is None:
        raise SystemExit(f"/proc/self/status does not tell {field}: memory is measured on Linux alone")
    return int(found[1]) << 10


def peak(work: Callable[[], object]) -> int:
    """Bytes by which `work` raises the most that is resident."""
    Path("/proc/self/clear_refs").write_text("5")  # proc(5): resets the peak
    before = resident("VmRSS")
    work()
    return resident("VmHWM") - before


def measure(elements: int) -> dict[str, Any]:
    chunk = step(min(elements, 1 << 22), SPREAD, rate_for(0.03, [SPREAD]), 9)
    warm_up()  # the kernels are compiled now
    alone = resident("VmRSS")
    base, new = (np.resize(array, elements) for array in chunk)
    kept: list[bytes] = []
    encode = peak(lambda: kept.extend(_encoded(base, new)))
    patch_bytes = sum(map(len, kept))
    applied = peak(lambda: _apply(kept, base)) + patch_bytes
    if not np.array_equal(base, new):
        raise SystemExit("the applied patch does not give the new weights")
    model = {"elements": elements, "model_bytes": base.nbytes, "patch_bytes": patch_bytes, "process_bytes": alone}
    return {**model, "encode_bytes": encode, "apply_bytes": applied}


def _encoded(base: Array, new: Array) -> Iterator[bytes]:
    codec = TileCodec(2)
    for part in _parts(base):
        yield codec.encode(base[part], new[part])


def _apply(patches: list[bytes], base: Array) -> None:
    codec = TileCodec(2)
    for patch, part in zip(patches, _parts(base), strict=True):
        codec.apply(patch, base[part])


def _parts(units: Array) -> Iterator[slice]:
    stride = TILE_BYTES // 2
    for start in range(0, len(units), stride):
        yield slice(start, start + stride)


if __name__ == "__main__":
    print(json.dumps(measure(int(sys.argv[1]))))
