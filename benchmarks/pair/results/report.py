"""The tables of co-serving, and its figures over all cells."""

from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from benchmarks.pair.over_rose import real_tokens_over_rose
from benchmarks.pair.results.figures import TPOT_FACTOR, TTFT_FACTOR, Alone, Cell, best_rose, kept, percentile, row
from benchmarks.pair.results.intervals import attainment_less_alone, intervals
from ebbtide.demo.coserving.coserving_records import ReplayRecord

_COLUMNS = (
    "policy", "n", "load", "TTFT p50", "p95", "p99", "x alone", "TPOT p50", "p95", "p99", "x alone", "SLO", "tok/s",
    "of ideal", "twice", "late p99", "reclaim p99",
)  # fmt: skip


def told(
    scene: str, trace: str, load: int, found: dict[str, Cell], alone: Alone, console: Console, *, noise: bool = False
) -> list[dict[str, Any]]:
    """A row for each policy, shown as a table. `noise`: all but `alone` was measured beside a stray process, and is
    compared with serving alone beside it; `alone` says what the SLO is."""
    twice = [cell for name, cell in found.items() if name.startswith("alone") and not (noise and name == "alone")]
    rows = [row(cell, twice, alone, found["alone"]) for cell in found.values()]
    slo_s = [1e-3 * target for target in rows[0]["slo_ms"]]
    rows = [one | intervals(cell, *slo_s) for one, cell in zip(rows, found.values(), strict=True)]
    if noise:
        beside = [attainment_less_alone(cell, twice[0], *slo_s) for cell in found.values()]
        rows = [one | less for one, less in zip(rows, beside, strict=True)]
    table = Table(title=scene, title_justify="left")
    for column in _COLUMNS:
        table.add_column(column, justify="left" if column == "policy" else "right")
    for one in rows:
        table.add_row(
            one["policy"], str(one["requests"]), f"{one['load']:.2f}",
            *(f"{one[f'ttft_p{at}_ms']:.0f}" for at in (50, 95, 99)), f"{one['ttft_p99_over_alone']:.3f}",
            *(f"{one[f'tpot_p{at}_ms']:.1f}" for at in (50, 95, 99)), f"{one['tpot_p99_over_alone']:.3f}",
            f"{one['slo_attainment']:.4f}", f"{one['rollout_tokens_per_s']:.0f}",
            f"{one['share_of_ideal_harvest']:.2f}", str(one["tokens_generated_twice"]), f"{one['late_p99_ms']:.0f}",
            f"{one['reclaim_p99_ms']:.1f}" if one["reclaims"] else "-",
        )  # fmt: skip
    console.print(table)
    return [{"scene": scene, "trace": trace, "target_load": load, "step_ms": 1e3 * alone.step_s, **one} for one in rows]


def alone_run(cell: Cell, rollouts: Alone) -> dict[str, Any]:
    """What costs are fitted to: the requests of each block of serving alone (seconds from the block's begin, tokens),
    and the steps of rollouts alone."""
    blocks = []
    for block in cell.blocks:
        begin = min((one.due for one in block.answers), default=0.0)
        whole = [one for one in block.answers if not one.failed]
        times = [[one.sent - begin, one.first - begin, one.last - begin] for one in whole]
        blocks.append([[*at, one.prompt, one.output] for at, one in zip(times, whole, strict=True)])
    samples = [msgspec.to_builtins(one) for one in rollouts.samples]
    return {
        "served": blocks,
        "rollouts": {"tokens_per_s": rollouts.tokens_per_s, "step_s": rollouts.step_s, "samples": samples},
    }


def draw(scene: str, found: dict[str, Cell], path: Path) -> None:
    """The first block of ours, as a timeline."""
    from ebbtide.demo.coserving.coserving_picture import write_coserving_picture

    block, alone = found["ours"].blocks[0], found["alone"]
    replay = ReplayRecord(
        title=f"{scene}: the serving-guard in the traffic, two engines on the cores of one machine",
        answers=tuple(block.answers),
        moments=tuple(block.moments),
        ttft_s=TTFT_FACTOR * percentile(alone.ttft, 99),
        tpot_s=TPOT_FACTOR * percentile(alone.tpot, 99),
    )
    write_coserving_picture(replay, path)


def figures(found: dict[str, Any]) -> dict[str, Any]:
    """Over all traces and loads the worst of ours; the intervals are those of the worst cells."""
    cells = found["cells"]
    ours = [one for one in cells if one["policy"] == "ours"]
    again = [one for one in cells if one["policy"] == "alone-again"]
    ttft: dict[str, Any] = max(ours, key=lambda one: one["ttft_p99_over_alone"], default={})
    tpot: dict[str, Any] = max(ours, key=lambda one: one["tpot_p99_over_alone"], default={})
    checks = {one["scene"]: _checks(one, cells) for one in ours}
    unqueued = [one["ttft_p99_over_alone_unqueued"] for one in ours]
    over = [(one, rose) for one in ours if (rose := best_rose(_of(one, cells)))]
    return {
        "slo_attainment": min((one["slo_attainment"] for one in ours), default=None),
        "ttft_p99_over_alone": ttft.get("ttft_p99_over_alone"),
        "ttft_p99_over_alone_interval": ttft.get("ttft_p99_over_alone_interval"),
        "ttft_p99_excess_ms": max((one["ttft_p99_excess_ms"] for one in ours), default=None),
        "tpot_p99_over_alone": tpot.get("tpot_p99_over_alone"),
        "tpot_p99_over_alone_interval": tpot.get("tpot_p99_over_alone_interval"),
        "ttft_p50_alone_ms": min((one["ttft_p50_ms"] for one in cells if one["policy"] == "alone"), default=None),
        "ttft_p99_over_alone_unqueued": max((one for one in unqueued if one is not None), default=None),
        "noise_ttft_p99": [_again(one, cells, "ttft_p99_ms") for one in again],
        "noise_tpot_p99": [_again(one, cells, "tpot_p99_ms") for one in again],
        **{f"share_of_ideal_harvest_at_{load}": _harvest(ours, load) for load in (20, 50, 80)},
        "rollout_tokens_over_rose": min((_over(one, rose) for one, rose in over), default=None),
        "rose_taken": {one["scene"]: rose["policy"] for one, rose in over},
        "rollout_tokens_over_rose_with_most_tokens": min(
            (_over(one, _greediest(one, cells)) for one, _ in over), default=None
        ),
        "real_tokens_over_rose": real_tokens_over_rose(cells),
        "attainment_less_alone_beside_noise": min(
            (one["attainment_less_alone"] for one in ours if one.get("attainment_less_alone") is not None), default=None
        ),
        "stray_share": max((one["stray_share"] for one in cells), default=None),
        "reclaim_p99_ms": max((one["reclaim_p99_ms"] for one in ours), default=None),
        "rollout_step_ms": max((one["step_ms"] for one in ours), default=None),
        "tokens_lost": found["books"]["lost"],
        "rollouts_finished_twice": found["books"]["twice"],
        "rollouts_short": found["books"]["short"],
        "rollouts_unfinished": found["books"]["unfinished"],
        "proxy_overhead_p50_ms": found["proxy"]["alone"]["first_token_p50_ms"]["added"],
        "proxy_requests_per_s": found["proxy"]["proxied_closed_loop"]["per_s"],
        "kept": checks,
    }


def _again(one: dict[str, Any], cells: list[dict[str, Any]], name: str) -> float:
    """What was measured alone again, over the first time."""
    first = next(two for two in _of(one, cells) if two["policy"] == "alone")
    return float(one[name] / first[name])


def _of(one: dict[str, Any], cells: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [two for two in cells if two["scene"] == one["scene"]]


def _checks(one: dict[str, Any], cells: list[dict[str, Any]]) -> dict[str, bool]:
    beside = _of(one, cells)
    return kept(one, [two for two in beside if two["policy"].startswith("alone")], best_rose(beside))


def _greediest(one: dict[str, Any], cells: list[dict[str, Any]]) -> dict[str, Any]:
    rivals = [two for two in _of(one, cells) if two["policy"].startswith("rose")]
    return max(rivals, key=lambda two: two["rollout_tokens_per_s"])


def _over(one: dict[str, Any], rose: dict[str, Any]) -> float:
    return float(one["rollout_tokens_per_s"] / max(1.0, rose["rollout_tokens_per_s"]))


def _harvest(ours: list[dict[str, Any]], load: int) -> float | None:
    return min((one["share_of_ideal_harvest"] for one in ours if one["target_load"] == load), default=None)
