"""Tables of what was measured, for people."""

from collections.abc import Iterator, Sequence
from typing import Any, Final

#: Name of a group of rows, and the densities that it takes, up to the next one's.
GROUPS: Final = (
    ("below 0.3 %", 0.0),
    ("0.3 to 1 %", 0.003),
    ("1 to 5 %", 0.01),
    ("5 to 20 %", 0.05),
    ("above 20 %", 0.2),
)
_HEAD: Final = (
    f"{'':52} {'changed':>8} {'MB dense':>9} {'patch MB':>9} {'dense/':>7} {'patch/':>7} {'COO/':>7} {'Astra/':>7}"
    f" {'XOR+z1/':>8} {'XOR+z3/':>8} {'patch/':>7}\n"
    f"{'':52} {'':>8} {'':>9} {'':>9} {'patch':>7} {'bound':>7} {'patch':>7} {'patch':>7}"
    f" {'patch':>8} {'patch':>8} {'best':>7}"
)


def group_of(density: float) -> str:
    return [name for name, least in GROUPS if density >= least][-1]


def size_table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows of `formats.sizes`, by density."""
    lines = [_HEAD]
    for name, _ in GROUPS:
        group = [row for row in rows if group_of(row["density"]) == name]
        lines += [name, *map(_size_line, sorted(group, key=lambda row: row["density"]))] if group else []
    return "\n".join(lines)


def _size_line(row: dict[str, Any]) -> str:
    patch = row["patch"]
    over = [row[name] / patch for name in ("coo", "astraflow", "xor_zstd_1", "xor_zstd_3")]
    bound = f"{patch / row['bound']:7.3f}" if row["bound"] else f"{'-':>7}"
    return (
        f"  {row['label'][:50]:50} {row['density']:8.3%} {row['dense'] / 1e6:9.1f} {patch / 1e6:9.3f}"
        f" {row['dense'] / patch:7.1f} {bound} {over[0]:7.2f} {over[1]:7.2f} {over[2]:8.2f} {over[3]:8.2f}"
        f" {row['patch_over_best_other']:7.3f}"
    )


def speed_table(rows: Sequence[dict[str, Any]], memory: dict[str, Any]) -> str:
    return "\n".join((*_speed_lines(rows), *_memory_lines(memory)))


def _speed_lines(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    for row in rows:
        yield (
            f"{row['bytes'] / 1e6:.0f} MB of bf16, {row['density']:.2%} changed, {row['threads']} thread(s), "
            f"median of {row['rounds']} rounds; GB of dense bytes, per core against memcpy in the same round"
        )
        for name, value in row["gb_per_cpu_s"].items():
            yield (
                f"  {name:8} {value:7.2f} GB per CPU second  {row['over_memcpy'][name]:6.3f} x memcpy"
                f"  {row['gb_per_s'][name]:7.2f} GB/s by the clock"
            )


def _memory_lines(found: dict[str, Any]) -> Iterator[str]:
    model = found["model_bytes"]
    yield f"Memory beyond both versions of {model / 1e6:.0f} MB, the patch and the codec's included"
    for name in ("encode", "apply"):
        size = found[f"{name}_bytes"]
        yield f"  {name:8} {size / 1e6:7.2f} MB  {size / model:6.2%} of a version"
