"""Sizes and speeds of weight patches on synthetic steps, beside what else is in use and the order-0 entropy.

    python benchmarks/patch_codec.py [--elements 100000000] [--json FILE]

The steps: four tensors whose fp32 master weights are normal (standard deviations 0.01, 0.02, 0.04, 0.08) take one step
of AdamW (betas 0.9 and 0.999, decay 0.1) in its stationary state under gradients that are noise: m / sqrt(v) is then
normal with a standard deviation of sqrt((1 - 0.9) / (1 + 0.9)) = 0.23. Base and new are the masters rounded to bf16, to
nearest even. The learning rate is searched so that the wanted share of the elements changes.

The bound, per tensor: positions as independent draws at the tensor's density, differences by their histogram.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import zstandard

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.arguments import count, output, share
from benchmarks.conditions import conditions
from ebbtide.weights.patch.alphabet import Array
from ebbtide.weights.patch.tensor import Patch, check_patch, encode_patch, install_patch, read_patch
from ebbtide.weights.patch.tile import TileCodec

SPREADS = (0.01, 0.02, 0.04, 0.08)
DENSITIES = (0.003, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 0.95)
#: Elements that are made at once, so that making them takes little memory.
CHUNK = 1 << 20


def to_bf16(values: Array) -> Array:
    """Bit patterns (uint16) of float32 values rounded to nearest even."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def step(elements: int, spread: float, rate: float, seed: int) -> tuple[Array, Array]:
    """bf16 bit patterns of a tensor before and after a step."""
    rng = np.random.default_rng(seed)
    base, new = np.empty(elements, np.uint16), np.empty(elements, np.uint16)
    for start in range(0, elements, CHUNK):
        part = slice(start, min(start + CHUNK, elements))
        size = part.stop - start
        master = rng.standard_normal(size, dtype=np.float32) * np.float32(spread)
        update = rng.standard_normal(size, dtype=np.float32) * np.float32((0.1 / 1.9) ** 0.5)
        base[part] = to_bf16(master)
        new[part] = to_bf16(master - np.float32(rate) * (update + np.float32(0.1) * master))
    return base, new


def rate_for(density: float, spreads: Sequence[float] = SPREADS) -> float:
    """The learning rate at which about this share of the elements of tensors with these spreads changes."""
    low, high = 1e-9, 1.0
    for _ in range(20):
        middle = (low * high) ** 0.5
        changed = np.mean([np.mean(np.not_equal(*step(1 << 19, spread, middle, 0))) for spread in spreads])
        low, high = (middle, high) if changed < density else (low, middle)
    return high


def bound(base: Array, new: Array) -> float:
    """Bytes of the order-0 entropy of a tensor's change."""
    differences = (new - base)[base != new]
    if not len(differences):
        return 0.0
    histogram = np.bincount(differences)
    bits = entropy(histogram) + entropy(np.array([len(differences), len(base) - len(differences)]))
    return bits / 8


def entropy(histogram: Array) -> float:
    """Bits that all draws of a histogram take together."""
    counts = histogram[histogram > 0].astype(np.float64)
    return float(-(counts * np.log2(counts / counts.sum())).sum())


def sizes(elements: int, density: float, compiled: bool | None) -> dict[str, Any]:
    """One row of the table of sizes: bytes by format, over all tensors."""
    rate, codec = rate_for(density), TileCodec(2, compiled=compiled)
    row = dict.fromkeys(("dense", "bound", "patch", "coo", "astraflow", "xor_zstd_1", "xor_zstd_3"), 0.0)
    changed = 0
    for seed, spread in enumerate(SPREADS):
        base, new = step(elements // len(SPREADS), spread, rate, seed + 1)
        changes = int(np.count_nonzero(base != new))
        changed += changes
        row["dense"] += new.nbytes
        row["bound"] += bound(base, new)
        row["patch"] += sum(len(part) for part in encode_patch("BF16", base.tobytes(), new.tobytes(), codec=codec))
        row["coo"] += changes * (4 + 2)
        row["astraflow"] += changes * (8 + 2) + (16 if seed == 0 else 0)
        for level in (1, 3):
            row[f"xor_zstd_{level}"] += len(zstandard.ZstdCompressor(level=level).compress((base ^ new).data))
    return {"density": changed / (elements // len(SPREADS) * len(SPREADS)), "rate": rate, **row}


def timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def halves(length: int, parts: int, tile: int) -> Iterator[slice]:
    """`length` bytes in so many parts of whole tiles."""
    stride = -(-length // tile // parts) * tile
    for start in range(0, length, stride):
        yield slice(start, min(start + stride, length))


def speeds(elements: int, density: float, rounds: int, threads: int, compiled: bool | None) -> dict[str, Any]:
    """Median seconds of each operation. Each round does them all, so that they share the machine's moods."""
    pair = step(elements, 0.02, rate_for(density, [0.02]), 9)
    base, new = (array.view(np.uint8).data for array in pair)
    target = np.empty(len(base), np.uint8).data
    codecs = [TileCodec(2, compiled=compiled) for _ in range(threads)]
    parts = list(halves(len(base), threads, 1 << 20))
    data: list[bytes] = [b""] * len(parts)
    patches: dict[int, Patch] = {}

    def encode(index: int) -> None:
        part = parts[index]
        data[index] = b"".join(encode_patch("BF16", base[part], new[part], codec=codecs[index]))

    def check(index: int) -> None:
        patches[index] = read_patch(data[index], "BF16", len(base[parts[index]]) // 2)
        check_patch(patches[index], codecs[index])

    def install(index: int) -> None:
        install_patch(patches[index], target[parts[index]], codecs[index])

    times: dict[str, list[float]] = {"memcpy": [], "encode": [], "check": [], "apply": []}
    with ThreadPoolExecutor(threads) as pool:

        def spread(work: Callable[[int], None]) -> float:
            return timed(lambda: list(pool.map(work, range(len(parts)))))

        for index in range(rounds + 1):  # the first compiles the kernels, and touches the memory
            found = {
                "memcpy": timed(lambda: np.copyto(np.asarray(target), np.asarray(base))),
                "encode": spread(encode),
                "check": spread(check),
                "apply": spread(install),
            }
            if target != new:
                raise SystemExit("the applied patch does not give the new weights")
            for name, value in found.items() if index else ():
                times[name].append(value)
    seconds = {name: median(values) for name, values in times.items()}
    return {
        "density": float(np.mean(np.not_equal(*pair))),
        "bytes": len(base),
        "patch": sum(map(len, data)),
        "threads": threads,
        "seconds": seconds,
        "gb_per_s": {name: len(base) / value / 1e9 for name, value in seconds.items()},
        "over_memcpy": {name: seconds["memcpy"] / value for name, value in seconds.items()},
        "all_seconds": times,
    }


def show(found: dict[str, Any]) -> None:
    print("density   bits/change  patch/bound  dense/patch  XOR+zstd/patch (1, 3)  COO/patch  AstraFlow/patch")
    for row in found["sizes"]:
        patch, changes = row["patch"], row["coo"] / 6
        print(
            f"{row['density']:7.3%}  {8 * patch / changes:11.2f}  {patch / row['bound']:11.4f}"
            f"  {row['dense'] / patch:11.1f}"
            f"  {row['xor_zstd_1'] / patch:13.2f}, {row['xor_zstd_3'] / patch:6.2f}  {row['coo'] / patch:9.2f}"
            f"  {row['astraflow'] / patch:15.2f}"
        )
    for row in found["speeds"]:
        print(f"\n{row['bytes'] / 1e6:.0f} MB of bf16, {row['density']:.2%} changed, {row['threads']} thread(s)")
        for name, value in row["gb_per_s"].items():
            print(f"{name:8} {value:7.2f} GB/s of dense bytes  {row['over_memcpy'][name]:6.3f} x memcpy by one thread")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=count, default=100_000_000, help="for speeds")
    parser.add_argument("--size-elements", type=count, default=8_000_000, help="for each row of sizes")
    parser.add_argument("--densities", type=share, nargs="*", default=DENSITIES)
    parser.add_argument("--speed-densities", type=share, nargs="*", default=[0.03])
    parser.add_argument("--rounds", type=count, default=7)
    parser.add_argument("--threads", type=count, nargs="*", default=[1, 2])
    parser.add_argument("--plain", action="store_true", help="numpy's kernels in place of numba's")
    parser.add_argument("--json", type=output, help="write all figures to this file")
    options = parser.parse_args()
    compiled = False if options.plain else None
    found = {
        "conditions": conditions(),
        "sizes": [sizes(options.size_elements, density, compiled) for density in options.densities],
        "speeds": [
            speeds(options.elements, density, options.rounds, threads, compiled)
            for density in options.speed_densities
            for threads in options.threads
        ],
    }
    show(found)
    if options.json:
        options.json.write_text(json.dumps(found, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
