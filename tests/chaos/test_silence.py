"""Workers that fall silent are found soon, and their rollouts go on soon; workers that are merely slow are let be."""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from random import Random
from typing import Any, Final

import numpy as np
import pytest
from msgspec.structs import replace

from ebbtide.types.run import AttemptSpan
from tests.chaos.cluster import SCRIPT, Cluster
from tests.chaos.load import Begin, Load
from tests.support.waiting import wait_until

#: Rollouts on four workers of 32 slots: those of a lost one find room at once.
OPEN: Final = 40
HEARTBEATS: Final = {"heartbeat_s": 1.0, "heartbeat_timeout_s": 2.5}
#: How long nobody may be suspected; ten minutes are asked for with EBBTIDE_JITTER_S=600.
JITTER_S: Final = float(os.environ.get("EBBTIDE_JITTER_S", "60"))


class Record:
    """Who was frozen when, by the wall clock that logs bear."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.frozen: dict[str, float] = {}

    def found(self) -> dict[str, float]:
        """When each worker was noticed, by the coordinator's log."""
        entries = [entry for event in ("lost", "suspected") for entry in self._cluster.logged("coordinator", event)]
        return {entry["worker_id"]: datetime.fromisoformat(entry["timestamp"]).timestamp() for entry in entries}

    def detections(self) -> list[float]:
        found = self.found()
        return [found[worker] - when for worker, when in self.frozen.items()]

    def resumptions(self, load: Load, spans: Sequence[AttemptSpan]) -> list[float]:
        """From the detection to the first token more, of each rollout that was cut."""
        found, waits = self.found(), []
        for span in spans:
            if span.worker_id in self.frozen and not span.finished:
                after = min(when for when, stored in load.seen[span.rollout_id] if stored > span.last)
                waits.append(max(0.0, after - found[span.worker_id]))
        return waits


async def freeze_many(cluster: Cluster, load: Load, *, rounds: int, seed: int) -> Record:
    """In each round two of four workers are frozen at random moments, found, and replaced by fresh ones."""
    record, random = Record(cluster), Random(seed)
    living = [f"w{number}" for number in range(1, 5)]
    busy = asyncio.create_task(load.keep_open(OPEN))
    for number in range(rounds):
        for _ in range(2):
            await load.more_tokens(random.randrange(300, 1200))
            living.remove(victim := random.choice(living))
            record.frozen[victim] = time.time()
            cluster.freeze(victim)
        await wait_until(lambda: record.frozen.keys() <= record.found().keys(), timeout=20, what="their detection")
        cluster.kill(*(set(cluster.process) & record.frozen.keys()))
        fresh = [f"w{5 + 2 * number}", f"w{6 + 2 * number}"]
        await asyncio.gather(*map(cluster.worker, fresh))
        living += fresh
    busy.cancel()
    await asyncio.gather(busy, return_exceptions=True)
    return record


async def check_silences(cluster: Cluster, begin: Begin, *, rounds: int, detection_s: float, resume_s: float) -> None:
    load = await begin(workers=4, **HEARTBEATS)
    record = await freeze_many(cluster, load, rounds=rounds, seed=rounds)
    await load.all_finished()
    detections, resumptions = record.detections(), record.resumptions(load, await load.spans())
    await load.settle()
    load.check_losses()
    assert len(resumptions) >= 2 * rounds
    assert len(record.found()) == len(record.frozen) == 2 * rounds, "somebody was suspected who was not silent"
    said = {name: quantiles(values) for name, values in (("detection", detections), ("resume", resumptions))}
    print(said)  # noqa: T201 - these figures are published
    assert said["detection"]["p99"] <= detection_s, said
    assert said["resume"]["p50"] <= 1.0, said
    assert said["resume"]["p99"] <= resume_s, said


def quantiles(values: list[float]) -> dict[str, Any]:
    shares = {f"p{share}": round(float(np.quantile(values, share / 100)), 3) for share in (50, 99)}
    return {"count": len(values), **shares, "max": round(max(values), 3)}


async def test_frozen_workers_are_found_and_their_rollouts_go_on(cluster: Cluster, begin: Begin) -> None:
    await check_silences(cluster, begin, rounds=2, detection_s=3.5, resume_s=5.0)  # with room for a busy machine


async def test_an_engine_that_makes_nothing_while_heartbeats_go_on_is_found(cluster: Cluster, begin: Begin) -> None:
    load = await begin(workers=2, **HEARTBEATS)
    busy = asyncio.create_task(load.keep_open(OPEN))
    await load.more_tokens(OPEN * 4)
    await cluster.worker("w3", script=replace(SCRIPT, stall_at_s=4.0, stall_s=10.0))
    (ready,) = cluster.logged("w3", "engine ready")
    record = Record(cluster)
    record.frozen["w3"] = datetime.fromisoformat(ready["timestamp"]).timestamp() + 4.0
    await wait_until(lambda: "w3" in record.found(), timeout=20, what="its detection")
    busy.cancel()
    await asyncio.gather(busy, return_exceptions=True)
    await load.settle()
    (found,) = cluster.logged("coordinator", "suspected")
    assert "no token" in found["reason"]
    assert record.detections()[0] <= 3.5  # with room for a busy machine
    assert min(record.resumptions(load, await load.spans())) <= 5.0
    load.check_losses()


@pytest.mark.nightly
@pytest.mark.timeout(900)
async def test_forty_frozen_workers_are_found_within_three_seconds(cluster: Cluster, begin: Begin) -> None:
    await check_silences(cluster, begin, rounds=20, detection_s=3.0, resume_s=5.0)


@pytest.mark.nightly
@pytest.mark.timeout(JITTER_S + 180)
async def test_nobody_is_suspected_under_jitter_of_half_a_second_and_a_loaded_cpu(
    cluster: Cluster, begin: Begin
) -> None:
    cluster.routed = True
    load, random = await begin(workers=3, **HEARTBEATS), Random(0)
    await load.submit(OPEN)
    for (caller, _), way in cluster.ways.items():
        if caller.startswith("w"):
            way.forth.delay = way.back.delay = lambda: random.uniform(0.0, 0.5)
    with loaded_cpu():
        busy = asyncio.create_task(load.keep_open(OPEN))
        end = time.monotonic() + JITTER_S
        await wait_until(lambda: time.monotonic() > end, timeout=JITTER_S + 1)
        busy.cancel()
        await asyncio.gather(busy, return_exceptions=True)
        await load.all_finished()
    suspected = [entry for event in ("lost", "suspected") for entry in cluster.logged("coordinator", event)]
    assert suspected == []
    await load.settle()
    assert load.generated_twice() == 0


@contextmanager
def loaded_cpu() -> Iterator[None]:
    """Every core has a program that never rests."""
    spinners = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(os.cpu_count() or 1)]
    try:
        yield
    finally:
        for spinner in spinners:
            spinner.kill()
            spinner.wait()
