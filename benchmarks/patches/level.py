"""The codec half of the weights benchmark: sizes on real and synthetic pairs, speeds, memory, and its figures."""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.patches.formats import OTHERS, sizes
from benchmarks.patches.memory import memory
from benchmarks.patches.pairs import (
    CACHE,
    Pair,
    converted,
    demo_pairs,
    is_made,
    read_pair,
    steps_of,
    synthetic_pair,
    trained_pairs,
)
from benchmarks.patches.plans import PLANS, RECORD, version_file
from benchmarks.patches.report import size_table, speed_table
from benchmarks.patches.speeds import speeds

Tell = Callable[[str], None]
#: Of synthetic pairs, which meet them within some hundredths: the ends of `_NEAR` are to stay within it.
DENSITIES: Final = (0.003, 0.0052, 0.01, 0.02, 0.03, 0.049, 0.1, 0.2, 0.5, 0.95)
#: Of synthetic pairs; whole tiles and to spare.
ELEMENTS: Final = 8_000_000
QUICK_ELEMENTS: Final = 4_000_000
#: Of the tensor whose speeds are taken. Quick: three of 64 MB are twice the largest caches of today.
SPEED_ELEMENTS: Final = 100_000_000
QUICK_SPEED_ELEMENTS: Final = 32_000_000
ROUNDS: Final = 15
QUICK_ROUNDS: Final = 5
#: The densities that a patch is to come near its entropy at.
_NEAR: Final = (0.005, 0.05)
_LESS: Final = (
    f"a pair at each rate of the small network, and the demo's if they are there, in place of those of 100 M "
    f"parameters; synthetic ones of {QUICK_ELEMENTS:,} elements, not {ELEMENTS:,}; speeds with "
    f"{QUICK_SPEED_ELEMENTS:,}, not {SPEED_ELEMENTS:,}, in {QUICK_ROUNDS} rounds, not {ROUNDS}, by one thread alone"
)
_SPEEDS: Final = ("encode", "apply", "check", "publish", "pull", "digests")
CONDITIONS: Final = {
    "patch_over_entropy_bound": "bf16 pairs with 0.5 to 5 % of the elements changed, the worst; order-0 entropy",
    "xor_zstd_over_patch": "the same pairs, the worst; the better one of zstd's levels 1 and 3",
    "astraflow_over_patch": "the same pairs, the worst; 64-bit global indices and values",
    "patch_over_best_other": "all pairs of any density and dtype, the worst; the best of dense, COO, AstraFlow's, XOR "
    "with zstd 1 and 3",
    "encode_over_memcpy": "3 % changed, one thread, dense bytes per CPU second over memcpy's; digests apart",
    "apply_over_memcpy": "the same; in place, tile by tile, each patch checked as it is read",
    "check_over_memcpy": "the same; reading all patches, and writing nothing",
    "publish_over_memcpy": "the same, by what publishers encode with, less the digests of its tiles",
    "pull_over_memcpy": "the same, by what workers patch a mirror with: each tile a copy that is hashed, and then "
    "written; less the digests of its tiles",
    "digests_over_memcpy": "the same; the digests of all tiles of one version",
    "memory_overhead": "the larger of encode's and apply's peak beyond both versions of 100 M elements, over one",
}


def run_level(*, quick: bool, tell: Tell, given: tuple[Path, Path] | None = None, threads: int = 1) -> dict[str, Any]:
    """All of it; with a `given` pair of files its sizes alone. `threads` are those that networks are trained with."""
    if given:
        pair = read_pair(*given, "given", f"{given[0].name} to {given[1].name}")
        rows = [row_of(pair)]
        tell(size_table(rows))
        return {"figures": figures_of(rows), "conditions": CONDITIONS, "sizes": rows}
    made: dict[str, Any] = {}
    rows = [row_of(pair) for pair in all_pairs(quick, tell, made, threads)]
    tell(size_table(rows))
    dtypes = [row_of(pair) for pair in dtype_pairs()]
    tell(f"\nOne step of the small network, its masters rounded to each type\n{size_table(dtypes)}\n")
    elements = QUICK_SPEED_ELEMENTS if quick else SPEED_ELEMENTS
    found = [speeds(elements, 0.03, QUICK_ROUNDS if quick else ROUNDS, count) for count in ((1,) if quick else (1, 2))]
    taken = memory(SPEED_ELEMENTS)
    tell(speed_table(found, taken))
    figures = figures_of([*rows, *dtypes]) | speed_figures(found[0], taken)
    parts = {"sizes": rows, "dtypes": dtypes, "speeds": found, "memory": taken, "made": made}
    less = _LESS if quick else ""
    return {"figures": figures, "conditions": CONDITIONS | {"speed_elements": elements}, "less": less, **parts}


def all_pairs(quick: bool, tell: Tell, made: dict[str, Any], threads: int) -> Iterator[Pair]:
    """Real pairs, the demo's and synthetic ones, one in memory at a time. `made` hears how they came about.

    Quick: of the small network; the demo's where they are there; its rate, which is among the small network's, anyway.
    """
    family = "small" if quick else "real"
    pairs, record = trained_pairs(family, tell, threads=threads)
    made[family] = record
    tell(
        f"{record['parameters'] / 1e6:.1f} M parameters; loss {record['loss_of_random_weights']:.2f} nats a character "
        f"with random weights, {record['loss_after_training']:.2f} after {record['plan']['steps']} steps\n"
    )
    if not quick:
        trained_pairs("small", tell, threads=threads)  # whose masters the table of dtypes takes
    yield from pairs
    if not quick or is_made(CACHE / "demo"):
        pairs, made["demo"] = demo_pairs(tell, threads=threads)
        yield from pairs
    for density in DENSITIES:
        yield synthetic_pair(QUICK_ELEMENTS if quick else ELEMENTS, density)


def dtype_pairs() -> Iterator[Pair]:
    """One real step in every type that units carry; the small network's family is there by now."""
    versions = json.loads((CACHE / "small" / RECORD).read_text())["versions"]
    number = next(number for number, rate in steps_of(versions) if rate == PLANS["small"].masters)
    base, new = (CACHE / "small" / version_file(index, masters=True) for index in (number - 1, number))
    masters = read_pair(base, new, "real", "float32")
    yield masters
    for dtype, name in (("BF16", "bfloat16"), ("F16", "float16"), ("F8_E4M3", "float8, e4m3")):
        yield converted(masters, dtype, name)


def row_of(pair: Pair) -> dict[str, Any]:
    row = sizes(pair)
    return row | {"patch_over_best_other": row["patch"] / min(row[name] for name in OTHERS)}


def figures_of(rows: Sequence[dict[str, Any]]) -> dict[str, float | None]:
    """The worst of the pairs for each promise on sizes; None where no pair is of the density that it is about."""
    near = [row for row in rows if row["dtype"] == "BF16" and _NEAR[0] <= row["density"] <= _NEAR[1]]
    return {
        "patch_over_entropy_bound": max((row["patch"] / row["bound"] for row in near), default=None),
        "xor_zstd_over_patch": min(
            (min(row["xor_zstd_1"], row["xor_zstd_3"]) / row["patch"] for row in near), default=None
        ),
        "astraflow_over_patch": min((row["astraflow"] / row["patch"] for row in near), default=None),
        "patch_over_best_other": max((row["patch_over_best_other"] for row in rows), default=None),
    }


def speed_figures(row: dict[str, Any], taken: dict[str, Any]) -> dict[str, float]:
    figures = {f"{name}_over_memcpy": row["over_memcpy"][name] for name in _SPEEDS}
    most = max(taken["encode_bytes"], taken["apply_bytes"])
    return figures | {"memory_overhead": most / taken["model_bytes"]}
