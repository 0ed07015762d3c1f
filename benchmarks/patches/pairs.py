"""Pairs of consecutive weights: read from files, or made once and kept below `runs/bench-weights`."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import numpy as np
from msgspec import Struct

from benchmarks.patches.plans import PLANS, RECORD, Plan, version_file
from benchmarks.patches.synthetic import SPREADS, rate_for, step, to_bf16
from ebbtide.errors import InvalidRequest
from ebbtide.weights.dtypes import carrier
from ebbtide.weights.patch.alphabet import Array

ROOT: Final = Path(__file__).parents[2]
CACHE: Final = ROOT / "runs" / "bench-weights"
Tell = Callable[[str], None]


class Piece(Struct, frozen=True):
    """A tensor of both versions: flat unsigned units of 1, 2 or 4 bytes, views of files perhaps."""

    name: str
    dtype: str
    base: Array
    new: Array


class Pair(Struct, frozen=True):
    """`label` says what made it; `kind` is real, demo, synthetic or given."""

    kind: str
    label: str
    pieces: tuple[Piece, ...]


def read_safetensors(path: Path) -> dict[str, tuple[str, list[int], Array]]:
    """dtype, shape and flat units of each tensor in a file, which stays mapped. Raises `InvalidRequest`.

    The format: u64 bytes of a JSON header, the header, the data (github.com/huggingface/safetensors, README). No
    library reads it for numpy where there are bfloat16 tensors.
    """
    try:
        data = np.memmap(path, np.uint8, "r")
        start = 8 + int(data[:8].view("<u8")[0])
        header: dict[str, Any] = json.loads(data[8:start].tobytes())
        header.pop("__metadata__", None)
        found = {}
        for name, entry in header.items():
            first, last = (start + offset for offset in entry["data_offsets"])
            width = min(carrier(entry["dtype"]).itemsize, 4)
            found[name] = (entry["dtype"], entry["shape"], data[first:last].view(f"<u{width}"))
    except (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise InvalidRequest(f"{path} is no safetensors file ({error})", field="file") from error
    return found


def read_pair(base: Path, new: Path, kind: str, label: str) -> Pair:
    """The pair in two files. Raises `InvalidRequest` if they do not hold the same tensors."""
    old, young = read_safetensors(base), read_safetensors(new)
    if {name: value[:2] for name, value in old.items()} != {name: value[:2] for name, value in young.items()}:
        raise InvalidRequest(f"{new} does not hold the tensors of {base}, by name, dtype and shape", field="--to")
    pieces = (Piece(name, dtype, units, young[name][2]) for name, (dtype, _, units) in old.items())
    return Pair(kind, label, tuple(piece for piece in pieces if len(piece.base)))


def synthetic_pair(elements: int, density: float) -> Pair:
    """A step of AdamW in its stationary state, of tensors of four spreads (`benchmarks.patches.synthetic`)."""
    rate, size = rate_for(density), elements // len(SPREADS)
    made = ((spread, step(size, spread, rate, seed)) for seed, spread in enumerate(SPREADS, 1))
    pieces = tuple(Piece(f"spread {spread}", "BF16", *pair) for spread, pair in made)
    return Pair("synthetic", f"synthetic AdamW step, rate {rate:.2g}", pieces)


def trained_pairs(plan: str, tell: Tell, *, threads: int = 1) -> tuple[list[Pair], dict[str, Any]]:
    """Consecutive versions of a real network, made now unless they are there; and how they came about."""
    directory = made("training", plan, tell, threads=threads)
    record = json.loads((directory / RECORD).read_text())
    size = f"{record['parameters'] / 1e6:.0f} M"
    pairs = []
    for number, rate in steps_of(record["versions"]):
        base, new = (directory / version_file(index) for index in (number - 1, number))
        pairs.append(read_pair(base, new, "real", f"{size} Qwen3, supervised AdamW, rate {rate:g}"))
    return pairs, record


def steps_of(versions: Sequence[dict[str, Any]]) -> Iterator[tuple[int, float]]:
    """The versions that are one step from the one before them, and the rate of that step."""
    for number in range(1, len(versions)):
        if versions[number]["rate"] == versions[number - 1]["rate"]:
            yield number, versions[number]["rate"]


def demo_pairs(tell: Tell, *, threads: int = 1) -> tuple[list[Pair], dict[str, Any]]:
    """The demo's own policy: float32, as it is published, and rounded to bfloat16."""
    directory = made("demo", "demo", tell, threads=threads)
    record = json.loads((directory / RECORD).read_text())
    pairs = []
    for number in range(1, record["steps"] + 1):
        base, new = (directory / version_file(index) for index in (number - 1, number))
        label = f"the demo's, GRPO step {number}, rate {record['rates'][number - 1]:.2g}"
        pair = read_pair(base, new, "demo", f"{label}, float32")
        pairs += [pair, converted(pair, "BF16", f"{label}, bfloat16")]
    return pairs, record


def made(module: str, name: str, tell: Tell, *, threads: int) -> Path:
    """The directory of a family of versions; one that is not whole is made in a process of its own, and kept.

    Raises `subprocess.CalledProcessError` if that fails.
    """
    directory = CACHE / name
    plan = PLANS.get(name)
    if not is_made(directory, plan):
        tell(f"Making {directory.relative_to(ROOT)}; the next run finds it there.")
        words = [*([name] if plan else []), str(directory), "--threads", str(threads)]
        subprocess.run([sys.executable, "-m", f"benchmarks.patches.{module}", *words], cwd=ROOT, check=True)
    return directory


def is_made(directory: Path, plan: Plan | None = None) -> bool:
    """Whether a family is there, whole, and made by the plan as it is today."""
    record = directory / RECORD
    if plan is None or not record.is_file():
        return record.is_file()
    return bool(json.loads(record.read_text())["plan"] == json.loads(json.dumps(asdict(plan))))


def converted(pair: Pair, dtype: str, label: str) -> Pair:
    """A pair of float32 masters as a trainer would publish them in another type."""
    pieces = (
        Piece(piece.name, dtype, *(rounded(units.view(np.float32), dtype) for units in (piece.base, piece.new)))
        for piece in pair.pieces
    )
    return Pair(pair.kind, label, tuple(pieces))


def rounded(values: Array, dtype: str) -> Array:
    """Bit patterns of float32 values, to nearest even; for F8_E4M3 scaled by 64, as that type would lose small ones."""
    if dtype == "BF16":
        return to_bf16(values)
    if dtype == "F16":
        return values.astype(np.float16).view(np.uint16)
    if dtype == "F8_E4M3":
        import torch

        scaled = torch.from_numpy(values * np.float32(64)).clamp(-448, 448)
        patterns: Array = scaled.to(torch.float8_e4m3fn).view(torch.uint8).numpy()
        return patterns
    return values.view(np.uint32)
