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
from typing import Final

from msgspec import Struct
from msgspec.structs import asdict

from benchmarks.distribution.policy import Policy
from benchmarks.distribution.raw import one_transfer
from benchmarks.distribution.report import (
    FROM_PEERS,
    FULL,
    PATCHES,
    PATCHES_FROM_PEERS,
    STAR,
    SWEEP,
    Row,
    figures,
    row,
    table,
    told,
)
from benchmarks.distribution.scene import Scene, Update
from tests.support.waiting import wait_until

DENSITY: Final = 0.03
WORKERS: Final = 8
LATENCY_S: Final = 0.01
Tell = Callable[[str], None]


class Scale(Struct, frozen=True):
    """`copy_s`: how long one full copy takes on the slow link; `sweep`: the same, for the sweep of rates. `repeats`
    of the full copies, `updates` by patches."""

    mib: int
    copy_s: float
    star_copy_s: float
    repeats: int
    updates: int
    missed: tuple[int, ...]
    sweep: tuple[float, ...]
    kills: int


WHOLE: Final = Scale(64, 16.0, 8.0, 3, 5, (1, 5, 20), (32.0, 8.0, 2.0, 0.5, 0.0), 24)
QUICK: Final = Scale(16, 8.0, 1.0, 2, 3, (1, 5), (2.0, 0.0), 4)


def run_level(*, quick: bool = False, tell: Tell = lambda _: None) -> Row:
    """All scenes one after another, on this machine's loopback: rows, and `figures` of the whole."""
    return asyncio.run(_run(QUICK if quick else WHOLE, tell))


async def _run(scale: Scale, tell: Tell) -> Row:
    rows: list[Row] = []
    for scene in (_star, _pipelined, _peers):
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="ebb-weights-") as folder:
            rows += await scene(Path(folder), scale, tell)
        tell(f"{scene.__doc__} ({time.monotonic() - began:.0f} s)")
    tell(table(rows))
    under = (
        f"{WORKERS} workers with scripted engines, private mirrors, one machine's loopback; a policy of "
        f"{scale.mib} MiB whose full copy takes {scale.copy_s:g} s over the slow link, patches of {DENSITY:.0%} density"
    )
    found = figures(rows)
    conditions = dict.fromkeys(found, under)
    less = "" if scale is WHOLE else f"{asdict(scale)} in place of {asdict(WHOLE)}"
    return {"rows": rows, "figures": found, "conditions": conditions, "scale": asdict(scale), "less": less}


async def _star(folder: Path, scale: Scale, _: Tell) -> list[Row]:
    """star: each worker fetches all of each version over the link"""
    policy = Policy(scale.mib)
    async with Scene(folder, site_relay=False) as scene:
        once = await _begin(scene, policy, scale.star_copy_s)
        policy.step(1.0)  # every tile changes, as if there were no patches
        await scene.claim()
        return [row(STAR, await scene.update(policy, 1), policy, once)]


async def _pipelined(folder: Path, scale: Scale, tell: Tell) -> list[Row]:
    """a relay on the far side: full copies, patches, late joiners, those that missed versions, killed sources, rates"""
    policy, rows = Policy(scale.mib), []
    async with Scene(folder, site_relay=True) as scene:
        once = await _begin(scene, policy, scale.copy_s)
        for _ in range(scale.repeats):
            rows.append(await _full(scene, policy, once, FULL))
            tell(told(rows[-1]))
        for _ in range(scale.updates):
            policy.step(DENSITY)
            rows.append(row(PATCHES, await scene.update(policy, scene.steps), policy, once))
            tell(told(rows[-1]))
        rows += await _newcomers(scene, policy, once, scale.missed)
        rows.append(await _killed(scene, policy, once, scale.kills))
        for copy_s in scale.sweep:
            rate = await _shape(scene, policy, copy_s)
            rows.append(await _full(scene, policy, rate, SWEEP))
            policy.step(DENSITY)
            rows.append(row("sweep: patches", await scene.update(policy, scene.steps), policy, rate))
            tell(told(rows[-1]))
    return rows


async def _peers(folder: Path, scale: Scale, tell: Tell) -> list[Row]:
    """no relay on the far side: workers pass on what they have verified"""
    policy, rows = Policy(scale.mib), []
    async with Scene(folder, site_relay=False, peers=True) as scene:
        once = await _begin(scene, policy, scale.copy_s)
        for _ in range(scale.repeats):
            rows.append(await _full(scene, policy, once, FROM_PEERS))
            tell(told(rows[-1]))
        for _ in range(scale.repeats):
            policy.step(DENSITY)
            rows.append(row(PATCHES_FROM_PEERS, await scene.update(policy, scene.steps), policy, once))
    return rows


async def _begin(scene: Scene, policy: Policy, copy_s: float) -> float:
    """All workers have a first version; only then is the link slow. Seconds of one plain transfer over it."""
    await scene.claim()
    await scene.publish(policy, 0)
    await scene.start_workers(_names(WORKERS))
    await scene.settled()
    return await _shape(scene, policy, copy_s)


async def _full(scene: Scene, policy: Policy, once: float, what: str) -> Row:
    policy.step(1.0)
    await scene.claim()  # a new publisher knows no base: all tiles
    return row(what, await scene.update(policy, scene.steps), policy, once)


async def _newcomers(scene: Scene, policy: Policy, once: float, missed: tuple[int, ...]) -> list[Row]:
    """One that begins with nothing, and those that were away for some versions."""
    rows = []
    before, since = scene.passed(), time.time()
    version = scene.latest
    await scene.start_workers(["late"])
    rows.append(
        row(
            "late joiner, its start included", await scene.arrival(version, ["late"], before, since=since), policy, once
        )
    )
    for count in missed:
        scene.cluster.freeze("late")
        others = [name for name in scene.workers if name != "late"]
        for _ in range(count):
            policy.step(DENSITY)
            update = await scene.update(policy, scene.steps, others)
        before, since = scene.passed(), time.time()
        scene.cluster.thaw("late")
        rows.append(
            row(f"missed {count}", await scene.arrival(update.version, ["late"], before, since=since), policy, once)
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
    return row(f"full copies, the far relay killed {kills} times", await updating, policy, once)


def _passed(scene: Scene, mark: int, updating: "asyncio.Task[Update]") -> bool:
    return scene.link.received >= mark or updating.done()


async def _shape(scene: Scene, policy: Policy, copy_s: float) -> float:
    """Give the link a rate at which one copy takes `copy_s` (0: no limit), and measure how long a plain one does."""
    scene.link.bytes_per_s = policy.size / copy_s if copy_s else 0.0
    scene.link.latency_s = LATENCY_S
    return await one_transfer(policy.size, scene.link.bytes_per_s, LATENCY_S)


def _names(count: int) -> list[str]:
    return [f"w{number + 1}" for number in range(count)]
