"""The tables of co-serving, and its figures over all cells."""

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.pair.figures import TPOT_FACTOR, TTFT_FACTOR, Alone, Cell, kept, percentile, row
from ebbtide.cli.coserving_records import Replay

_COLUMNS = (
    "policy", "n", "load", "TTFT p50", "p95", "p99", "x alone", "TPOT p50", "p95", "p99", "x alone", "SLO", "tok/s",
    "of ideal", "twice", "reclaim p99",
)  # fmt: skip


def told(
    scene: str, trace: str, load: int, found: dict[str, Cell], alone: Alone, console: Console
) -> list[dict[str, Any]]:
    """A row for each policy, shown as a table."""
    rows = [row(cell, found["alone"], alone) for cell in found.values()]
    table = Table(title=scene, title_justify="left")
    for column in _COLUMNS:
        table.add_column(column, justify="left" if column == "policy" else "right")
    for one in rows:
        table.add_row(
            one["policy"], str(one["requests"]), f"{one['load']:.2f}",
            *(f"{one[f'ttft_p{at}_ms']:.0f}" for at in (50, 95, 99)), f"{one['ttft_p99_over_alone']:.3f}",
            *(f"{one[f'tpot_p{at}_ms']:.1f}" for at in (50, 95, 99)), f"{one['tpot_p99_over_alone']:.3f}",
            f"{one['slo_attainment']:.4f}", f"{one['rollout_tokens_per_s']:.0f}",
            f"{one['share_of_ideal_harvest']:.2f}", str(one["tokens_generated_twice"]), f"{one['reclaim_p99_ms']:.1f}",
        )  # fmt: skip
    console.print(table)
    return [{"scene": scene, "trace": trace, "target_load": load, "step_ms": 1e3 * alone.step_s, **one} for one in rows]


def draw(scene: str, found: dict[str, Cell], path: Path) -> None:
    """The first block of ours, as a timeline."""
    from ebbtide.cli.coserving_picture import write_coserving_picture

    block, alone = found["ours"].blocks[0], found["alone"]
    replay = Replay(
        title=f"{scene}: the serving-guard in the traffic, two engines on the cores of one machine",
        answers=tuple(block.answers),
        moments=tuple(block.moments),
        ttft_s=TTFT_FACTOR * percentile(alone.ttft, 99),
        tpot_s=TPOT_FACTOR * percentile(alone.tpot, 99),
    )
    write_coserving_picture(replay, path)


def figures(found: dict[str, Any]) -> dict[str, Any]:
    """Over all traces and loads the worst."""
    cells = found["cells"]
    ours = [one for one in cells if one["policy"] == "ours"]
    alone = {one["scene"]: one for one in cells if one["policy"] == "alone"}

    def worst(pick: Any, values: list[float]) -> float | None:
        return pick(values) if values else None

    def harvest(load: int) -> float | None:
        return worst(min, [one["share_of_ideal_harvest"] for one in ours if one["target_load"] == load])

    over = []
    for one in ours:
        rivals = [two for two in cells if two["scene"] == one["scene"] and two["policy"].startswith("rose")]
        best = max((two["rollout_tokens_per_s"] for two in rivals), default=0.0)
        if best:
            over.append(one["rollout_tokens_per_s"] / best)
    return {
        "slo_attainment": worst(min, [one["slo_attainment"] for one in ours]),
        "ttft_p99_over_alone": worst(max, [one["ttft_p99_over_alone"] for one in ours]),
        "ttft_p99_excess_ms": worst(max, [one["ttft_p99_excess_ms"] for one in ours]),
        "tpot_p99_over_alone": worst(max, [one["tpot_p99_over_alone"] for one in ours]),
        "share_of_ideal_harvest_at_20": harvest(20),
        "share_of_ideal_harvest_at_50": harvest(50),
        "share_of_ideal_harvest_at_80": harvest(80),
        "rollout_tokens_over_rose": worst(min, over),
        "reclaim_p99_ms": worst(max, [one["reclaim_p99_ms"] for one in ours]),
        "rollout_step_ms": worst(max, [one["step_ms"] for one in ours]),
        "tokens_lost": found["books"]["lost"],
        "rollouts_finished_twice": found["books"]["twice"],
        "proxy_overhead_p50_ms": found.get("proxy_overhead_p50_ms"),
        "cells_kept": {one["scene"]: kept(one, alone[one["scene"]]) for one in ours},
    }
