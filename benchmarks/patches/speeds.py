"""How fast tensors are patched, beside memcpy of the same bytes in the same rounds."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from typing import Any, Final

import numpy as np

from benchmarks.patches.production import Production
from benchmarks.patches.synthetic import rate_for, step
from ebbtide.types.weights import TILE_BYTES
from ebbtide.weights import tile_digest
from ebbtide.weights.patch import TileCodec

#: Spread of the masters, as in networks of a few hundred to a few thousand columns.
SPREAD: Final = 0.02
_UNITS: Final = TILE_BYTES // 2
#: What hashes tiles as well as it patches them: the time of the same digests, of tiles just read, is taken off.
_HASHING: Final = ("publish", "pull")
Seconds = dict[str, float]


class Bench:
    """One tensor of bf16, its tiles dealt out to threads, and what each operation does to those of one thread."""

    def __init__(self, elements: int, density: float, threads: int) -> None:
        base, new = step(elements, SPREAD, rate_for(density, [SPREAD]), 9)
        self.density = float(np.mean(base != new))
        self.base, self.new, self.target = base, new, np.empty_like(base)
        self.production = Production(base, new)
        self.threads = threads
        self._codecs = [TileCodec(2) for _ in range(threads)]
        self._patches = [b""] * -(-elements // _UNITS)

    @property
    def patch_bytes(self) -> int:
        return sum(map(len, self._patches))

    def memcpy(self, _: int) -> None:
        """Of all bytes, by one thread."""
        np.copyto(self.target, self.base)

    def encode(self, index: int) -> None:
        for tile in self._dealt(index):
            part = _part(tile)
            self._patches[tile] = self._codecs[index].encode(self.base[part], self.new[part])

    def check(self, index: int) -> None:
        for tile in self._dealt(index):
            self._codecs[index].check(self._patches[tile], len(self.new[_part(tile)]))

    def apply(self, index: int) -> None:
        for tile in self._dealt(index):
            self._codecs[index].apply(self._patches[tile], self.target[_part(tile)])

    def digests(self, index: int) -> None:
        for tile in self._dealt(index):
            tile_digest(self.new[_part(tile)].view("u1").data)

    def warm_digests(self, index: int) -> float:
        """Processor seconds of the digests alone, of tiles that were copied just before."""
        took = 0.0
        for tile in self._dealt(index):
            copy = self.new[_part(tile)].tobytes()
            start = time.thread_time()
            tile_digest(copy)
            took += time.thread_time() - start
        return took

    def publish(self, _: int) -> None:
        self.production.publish()

    def pull(self, index: int) -> None:
        self.production.pull(index, self.threads)

    def _dealt(self, index: int) -> range:
        return range(index, len(self._patches), self.threads)


class Clock:
    """Runs operations in a bench's threads, and times them by the clock and by the threads' own processor time."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self._pool = pool
        self.walls: Seconds = {}
        self.cpus: Seconds = {}

    def time(self, work: Callable[[int], float | None], threads: int) -> None:
        """`work` may say itself how many processor seconds count."""
        start = time.perf_counter()
        cpu = sum(self._pool.map(lambda index: _cpu(work, index), range(threads)))
        self.walls[work.__name__], self.cpus[work.__name__] = time.perf_counter() - start, cpu

    def without_digests(self, found: Seconds) -> Seconds:
        """`walls` or `cpus`, where `publish` and `pull` are less the share of their processor time that digests are."""
        hashed = self.cpus["warm_digests"]
        shares = {name: 1 - hashed / self.cpus[name] for name in _HASHING}
        return {name: value * shares.get(name, 1) for name, value in found.items() if name != "warm_digests"}


def _round(bench: Bench, clock: Clock) -> None:
    """Each operation once. Raises `SystemExit` if a patch is not exact."""
    work: Callable[[int], float | None]
    for work in (bench.encode, bench.check):
        clock.time(work, bench.threads)
    clock.time(bench.memcpy, 1)
    for work in (bench.apply, bench.digests, bench.warm_digests):
        clock.time(work, bench.threads)
    bench.production.begin()
    clock.time(bench.publish, bench.threads)
    bench.production.fetch()
    clock.time(bench.pull, bench.threads)
    if not np.array_equal(bench.target, bench.new) or not bench.production.holds():
        raise SystemExit("the applied patch does not give the new weights")


def speeds(elements: int, density: float, rounds: int, threads: int) -> dict[str, Any]:
    """Seconds of each operation in each round, and what their medians come to.

    `encode`, `check` and `apply` are the codec's alone; `publish` and `pull` all that services do with a tile, less the
    digests in it. Each round does them all, so that they share the machine's moods. `over_memcpy` is the
    median over the rounds of an operation's speed over memcpy's in the same round, by the processor time of the
    threads, all together: per core, whatever else the machine does. Raises `SystemExit` if a patch is not exact.
    """
    bench = Bench(elements, density, threads)
    walls: list[Seconds] = []
    cpus: list[Seconds] = []
    with ThreadPoolExecutor(threads) as pool:
        for index in range(rounds + 1):  # the first compiles the kernels, and touches the memory
            clock = Clock(pool)
            _round(bench, clock)
            if index:
                walls.append(clock.without_digests(clock.walls))
                cpus.append(clock.without_digests(clock.cpus))
    size = bench.new.nbytes
    return {
        "elements": elements,
        "density": bench.density,
        "bytes": size,
        "patch": bench.patch_bytes,
        "threads": threads,
        "rounds": rounds,
        "gb_per_s": {name: size / value / 1e9 for name, value in _medians(walls).items()},
        "gb_per_cpu_s": {name: size / value / 1e9 for name, value in _medians(cpus).items()},
        "over_memcpy": _over(cpus),
        "over_memcpy_by_the_clock": _over(walls),
        "all_seconds": walls,
        "all_cpu_seconds": cpus,
    }


def _medians(rounds: list[Seconds]) -> Seconds:
    return {name: median(found[name] for found in rounds) for name in rounds[0]}


def _over(rounds: list[Seconds]) -> Seconds:
    return _medians([{name: found["memcpy"] / value for name, value in found.items()} for found in rounds])


def _cpu(work: Callable[[int], float | None], index: int) -> float:
    start = time.thread_time()
    own = work(index)
    return time.thread_time() - start if own is None else own


def _part(tile: int) -> slice:
    return slice(tile * _UNITS, (tile + 1) * _UNITS)
