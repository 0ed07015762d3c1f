"""Full copies from one place, full copies passed on while they come, and patches: eight workers behind one slow link.

Rates are scaled to the policy, which is small: what counts is how long one copy of it takes over the link. A policy of
16 GB takes 13 s at 10 Gbit/s; so does one of 16 MiB at 1.25 MB/s.
"""

import asyncio
import functools
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median, quantiles
from typing import Any, Final

from msgspec import Struct

from benchmarks.distribution.policy import Policy
from benchmarks.distribution.raw import one_transfer
from benchmarks.distribution.scene import Scene, Update
from ebbtide.testing import wait_until

DENSITY: Final = 0.03
WORKERS: Final = 8
LATENCY_S: Final = 0.01
Tell = Callable[[str], None]
Row = dict[str, Any]


class Scale(Struct, frozen=True):
    """`copy_s`: how long one full copy takes on the slow link; `sweep`: the same, for the sweep of rates."""

    mib: int
    copy_s: float
    star_copy_s: float
    updates: int
    missed: tuple[int, ...]
    sweep: tuple[float, ...]
    kills: int


FULL: Final = Scale(64, 16.0, 8.0, 5, (1, 5, 20), (32.0, 8.0, 2.0, 0.5, 0.0), 24)
QUICK: Final = Scale(16, 8.0, 2.0, 3, (1, 5), (2.0, 0.0), 4)


def run_level(*, quick: bool = False, tell: Tell = lambda _: None) -> Row:
    """All scenes one after another, on this machine's loopback: rows, and `figures` of the whole."""
    return asyncio.run(_run(QUICK if quick else FULL, tell))


async def _run(scale: Scale, tell: Tell) -> Row:
    rows: list[Row] = []
    for scene in (_star, _pipelined, _peers):
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="ebb-weights-") as folder:
            rows += await scene(Path(folder), scale, tell)
        tell(f"{scene.__doc__} ({time.monotonic() - began:.0f} s)")
    tell(table(rows))
    told = (
        f"{WORKERS} workers with scripted engines, private mirrors, one machine's loopback; a policy of "
        f"{scale.mib} MiB whose full copy takes {scale.copy_s:g} s over the slow link, patches of {DENSITY:.0%} density"
    )
    figures = _figures(rows)
    conditions = dict.fromkeys(figures, told)
    return {"rows": rows, "figures": figures, "conditions": conditions, "scale": _asdict(scale)}


def _asdict(scale: Scale) -> Row:
    return {name: getattr(scale, name) for name in scale.__struct_fields__}


async def _star(folder: Path, scale: Scale, _: Tell) -> list[Row]:
    """star: each worker fetches all of each version over the link"""
    policy = Policy(scale.mib)
    async with Scene(folder, site_relay=False) as scene:
        await scene.claim()
        await scene.publish(policy, 0)
        await scene.start_workers(_names(WORKERS))
        await scene.settled()
        once = await _shape(scene, policy, scale.star_copy_s)
        policy.step(1.0)  # every tile changes, as if there were no patches
        await scene.claim()
        return [_row("star of full copies", await scene.update(policy, 1), policy, once)]


async def _pipelined(folder: Path, scale: Scale, tell: Tell) -> list[Row]:
    """a relay on the far side: full copies, patches, late joiners, those that missed versions, killed sources, rates"""
    policy, rows = Policy(scale.mib), []
    async with Scene(folder, site_relay=True) as scene:
        await scene.claim()
        await scene.publish(policy, 0)
        await scene.start_workers(_names(WORKERS))
        await scene.settled()
        once = await _shape(scene, policy, scale.copy_s)
        rows.append(await _full(scene, policy, once, "full copies, passed on while they come"))
        tell(_told(rows[-1]))
        for _ in range(scale.updates):
            policy.step(DENSITY)
            rows.append(_row("patches", await scene.update(policy, scene.steps), policy, once))
            tell(_told(rows[-1]))
        rows += await _newcomers(scene, policy, once, scale.missed)
        rows.append(await _killed(scene, policy, once, scale.kills))
        for copy_s in scale.sweep:
            rate = await _shape(scene, policy, copy_s)
            rows.append(await _full(scene, policy, rate, "sweep: full copies"))
            policy.step(DENSITY)
            rows.append(_row("sweep: patches", await scene.update(policy, scene.steps), policy, rate))
            tell(_told(rows[-1]))
    return rows


async def _peers(folder: Path, scale: Scale, _: Tell) -> list[Row]:
    """no relay on the far side: workers pass on what they have verified"""
    policy = Policy(scale.mib)
    async with Scene(folder, site_relay=False, peers=True) as scene:
        await scene.claim()
        await scene.publish(policy, 0)
        await scene.start_workers(_names(WORKERS))
        await scene.settled()
        once = await _shape(scene, policy, scale.copy_s)
        rows = [await _full(scene, policy, once, "full copies, from peers")]
        policy.step(DENSITY)
        rows.append(_row("patches, from peers", await scene.update(policy, scene.steps), policy, once))
        return rows


async def _full(scene: Scene, policy: Policy, once: float, what: str) -> Row:
    policy.step(1.0)
    await scene.claim()  # a new publisher knows no base: all tiles
    return _row(what, await scene.update(policy, scene.steps), policy, once)


async def _newcomers(scene: Scene, policy: Policy, once: float, missed: tuple[int, ...]) -> list[Row]:
    """One that begins with nothing, and those that were away for some versions."""
    rows = []
    before, since = scene.link.received, time.time()
    version = scene.latest
    await scene.start_workers(["late"])
    rows.append(
        _row(
            "late joiner, its start included", await scene.arrival(version, ["late"], before, since=since), policy, once
        )
    )
    for count in missed:
        scene.cluster.freeze("late")
        others = [name for name in scene.workers if name != "late"]
        for _ in range(count):
            policy.step(DENSITY)
            update = await scene.update(policy, scene.steps, others)
        before, since = scene.link.received, time.time()
        scene.cluster.thaw("late")
        rows.append(
            _row(f"missed {count}", await scene.arrival(update.version, ["late"], before, since=since), policy, once)
        )
    return rows


async def _killed(scene: Scene, policy: Policy, once: float, kills: int) -> Row:
    """The far relay, the source of all eight, is killed again and again while a full copy arrives, each time after as
    much as a tile has come."""
    policy.step(1.0)
    await scene.claim()
    before = scene.link.received
    updating = asyncio.create_task(scene.update(policy, scene.steps))
    for number in range(kills):
        mark = before + policy.size * (number + 1) // (kills + 1)
        there = functools.partial(_passed, scene, mark, updating)
        await wait_until(there, timeout=600, interval=0.005, what="a part of the version")
        scene.cluster.kill("site")
        await scene.start_site_relay()
    return _row(f"full copies, the far relay killed {kills} times", await updating, policy, once)


def _passed(scene: Scene, mark: int, updating: "asyncio.Task[Update]") -> bool:
    return scene.link.received >= mark or updating.done()


async def _shape(scene: Scene, policy: Policy, copy_s: float) -> float:
    """Give the link a rate at which one copy takes `copy_s` (0: no limit), and measure how long a plain one does."""
    scene.link.bytes_per_s = policy.size / copy_s if copy_s else 0.0
    scene.link.latency_s = LATENCY_S
    return await one_transfer(policy.size, scene.link.bytes_per_s, LATENCY_S)


def _names(count: int) -> list[str]:
    return [f"w{number + 1}" for number in range(count)]


def _row(what: str, update: Update, policy: Policy, once: float) -> Row:
    seconds = update.seconds
    return {
        "what": what,
        "workers": len(seconds),
        "one_transfer_s": once,
        "p50_s": median(seconds),
        "p99_s": quantiles(seconds, n=100, method="inclusive")[98] if len(seconds) > 1 else seconds[0],
        "last_s": seconds[-1],
        "last_over_one_transfer": seconds[-1] / once,
        "stall_s": sum(update.stalls),
        "crossed": update.crossed,
        "crossed_over_one_copy": update.crossed / policy.size,
    }


def table(rows: list[Row]) -> str:
    """Seconds from a version's commit at the trainer's relay, and what crossed the slow link, in copies."""
    lines = [f"{'':<44}{'plain copy':>11}{'p50':>8}{'p99':>8}{'last':>8}{'/ plain':>9}{'stalls':>9}{'copies':>9}"]
    lines += [
        f"{row['what']:<44}{row['one_transfer_s']:>9.2f} s{row['p50_s']:>8.2f}{row['p99_s']:>8.2f}{row['last_s']:>8.2f}"
        f"{row['last_over_one_transfer']:>9.2f}{row['stall_s']:>9.4f}{row['crossed_over_one_copy']:>9.3f}"
        for row in rows
    ]
    return "\n".join(lines)


def _told(row: Row) -> str:
    return f"{row['what']}: last of {row['workers']} after {row['last_s']:.2f} s, {row['crossed']:,} bytes crossed"


def _figures(rows: list[Row]) -> Row:
    def of(what: str, field: str) -> list[float]:
        return [row[field] for row in rows if row["what"] == what]

    full, patches = "full copies, passed on while they come", "patches"
    return {
        "slow_link_bytes_over_one_copy": max(
            of(full, "crossed_over_one_copy") + of("full copies, from peers", "crossed_over_one_copy")
        ),
        "last_install_over_one_transfer": max(of(full, "last_over_one_transfer")),
        "last_install_over_one_transfer_from_peers": max(of("full copies, from peers", "last_over_one_transfer")),
        "star_over_pipelined": max(of("star of full copies", "last_over_one_transfer"))
        / max(of(full, "last_over_one_transfer")),
        "full_over_patches": max(of(full, "last_s")) / median(of(patches, "last_s")),
        "patch_stall_s_per_worker": median(of(patches, "stall_s")) / WORKERS,
    }
