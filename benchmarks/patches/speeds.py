"""How fast tensors are patched, beside memcpy of the same bytes in the same rounds."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from typing import Any, Final

import numpy as np

from benchmarks.patches.synthetic import rate_for, step
from ebbtide.types.weights import TILE_BYTES
from ebbtide.weights import tile_digest
from ebbtide.weights.patch.tensor import Patch, check_patch, encode_patch, install_patch, read_patch
from ebbtide.weights.patch.tile import TileCodec

#: Spread of the masters, as in networks of a few hundred to a few thousand columns.
SPREAD: Final = 0.02


class Bench:
    """One tensor, cut into as many parts of whole tiles as there are threads, and what each operation does to it."""

    def __init__(self, elements: int, density: float, threads: int) -> None:
        pair = step(elements, SPREAD, rate_for(density, [SPREAD]), 9)
        self.density = float(np.mean(np.not_equal(*pair)))
        self.base, self.new = (array.view(np.uint8).data for array in pair)
        self.target = np.empty(len(self.base), np.uint8).data
        self.parts = list(_parts(len(self.base), threads))
        self._codecs = [TileCodec(2) for _ in self.parts]
        self._data = [b""] * len(self.parts)
        self._patches: dict[int, Patch] = {}

    @property
    def patch_bytes(self) -> int:
        return sum(map(len, self._data))

    def copy(self, _: int) -> None:
        """memcpy, of all bytes, by one thread."""
        np.copyto(np.asarray(self.target), np.asarray(self.base))

    def encode(self, index: int) -> None:
        part = self.parts[index]
        self._data[index] = b"".join(encode_patch("BF16", self.base[part], self.new[part], codec=self._codecs[index]))

    def check(self, index: int) -> None:
        elements = len(self.base[self.parts[index]]) // 2
        self._patches[index] = read_patch(self._data[index], "BF16", elements)
        check_patch(self._patches[index], self._codecs[index])

    def apply(self, index: int) -> None:
        install_patch(self._patches[index], self.target[self.parts[index]], self._codecs[index])

    def digests(self, index: int) -> None:
        part = self.new[self.parts[index]]
        for start in range(0, len(part), TILE_BYTES):
            tile_digest(part[start : start + TILE_BYTES])


def speeds(elements: int, density: float, rounds: int, threads: int) -> dict[str, Any]:
    """Seconds of each operation in each round, and what their medians come to.

    Each round does them all, so that they share the machine's moods. `over_memcpy` is the median over the rounds of an
    operation's speed over memcpy's in the same round, by the processor time of the threads, all together: per core,
    whatever else the machine does. Raises `SystemExit` if a patch is not exact.
    """
    bench = Bench(elements, density, threads)
    walls: dict[str, list[float]] = {name: [] for name in ("memcpy", "encode", "check", "apply", "digests")}
    cpus: dict[str, list[float]] = {name: [] for name in walls}
    with ThreadPoolExecutor(len(bench.parts)) as pool:

        def spread(work: Callable[[int], None], count: int = len(bench.parts)) -> tuple[float, float]:
            start = time.perf_counter()
            cpu = sum(pool.map(lambda index: _cpu(work, index), range(count)))
            return time.perf_counter() - start, cpu

        for index in range(rounds + 1):  # the first compiles the kernels, and touches the memory
            found = {"encode": spread(bench.encode), "check": spread(bench.check), "memcpy": spread(bench.copy, 1)}
            found |= {"apply": spread(bench.apply), "digests": spread(bench.digests)}
            if bench.target != bench.new:
                raise SystemExit("the applied patch does not give the new weights")
            for name, (wall, cpu) in found.items() if index else ():
                walls[name].append(wall)
                cpus[name].append(cpu)
    return {
        "elements": elements,
        "density": bench.density,
        "bytes": len(bench.base),
        "patch": bench.patch_bytes,
        "threads": len(bench.parts),
        "rounds": rounds,
        "gb_per_s": {name: len(bench.base) / median(values) / 1e9 for name, values in walls.items()},
        "gb_per_cpu_s": {name: len(bench.base) / median(values) / 1e9 for name, values in cpus.items()},
        "over_memcpy": {name: _over(cpus["memcpy"], values) for name, values in cpus.items()},
        "over_memcpy_by_the_clock": {name: _over(walls["memcpy"], values) for name, values in walls.items()},
        "all_seconds": walls,
        "all_cpu_seconds": cpus,
    }


def _over(copies: list[float], values: list[float]) -> float:
    return median(copy / value for copy, value in zip(copies, values, strict=True))


def _cpu(work: Callable[[int], None], index: int) -> float:
    start = time.thread_time()
    work(index)
    return time.thread_time() - start


def _parts(length: int, count: int) -> Iterator[slice]:
    stride = -(-length // TILE_BYTES // count) * TILE_BYTES
    for start in range(0, length, stride):
        yield slice(start, min(start + stride, length))
