"""Counts preemptions of a real vLLM engine on CPUs with little memory, with admission by memory and without."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.long_tail.admission.admitted_work import WorkItem, drawn_work, memory_blocks, packed_works
from benchmarks.real_kills.checkpoint import make_checkpoint
from ebbtide.local_cluster.launcher import tethered

#: Groups of four, and works: 64 rollouts each in full, 48 in one quick work.
_GROUPS, _WORKS = 16, 3
_QUICK_GROUPS, _QUICK_WORKS = 12, 1
_WITHIN_S: Final = 1_800.0
_ENGINE: Final = "benchmarks.long_tail.admission.admission_engine"
_ROOT: Final = Path(__file__).parents[3]


def admission_part(tell: Callable[[str], None], *, quick: bool) -> dict[str, Any]:
    """Preemptions with admission (without forecasts, the harder case) over those without, over all works."""
    count, groups = (_QUICK_WORKS, _QUICK_GROUPS) if quick else (_WORKS, _GROUPS)
    found = work_facts([drawn_work(seed, groups) for seed in range(count)])
    sums = summed(found["works"])
    for name, one in sums.items():
        tell(f"admission: {name}: {one['preemptions']} preemptions, {one['tokens_per_s']:.0f} tokens/s")
    return {"figures": {"engine_preemptions_share": preemptions_share(sums)}, "sums": sums, **found}


def work_facts(works: Sequence[Sequence[WorkItem]]) -> dict[str, Any]:
    """What one engine, with memory for a part of each work, did with all of them under each arrangement."""
    with tempfile.TemporaryDirectory(prefix="ebbtide-admission-") as folder:
        checkpoint, blocks = make_checkpoint(Path(folder) / "model", 1), memory_blocks(works)
        done = subprocess.run(
            tethered(
                sys.executable, "-m", "benchmarks.long_tail.admission.admission_engine", str(checkpoint), str(blocks)
            ),
            input=packed_works(works),
            cwd=_ROOT,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            timeout=_WITHIN_S,
        )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def summed(works: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Over all works, by arrangement; `throughput`: beside that without admission."""
    sums: dict[str, dict[str, Any]] = {}
    for name in dict.fromkeys(one["arrangement"] for one in works):
        mine = [one for one in works if one["arrangement"] == name]
        tokens, seconds = sum(one["tokens"] for one in mine), sum(one["seconds"] for one in mine)
        again = [one["read_again"] for one in mine if one["read_again"] is not None]
        sums[name] = {
            "preemptions": sum(one["preemptions"] for one in mine),
            "parked": sum(one["parked"] for one in mine),
            "handed_back": sum(one["handed_back"] for one in mine),
            "tokens_per_s": tokens / seconds,
            "read_again_share": sum(again) / tokens if again else None,
            "made_share": sum(one["made"] for one in mine) / tokens,
        }
    for one in sums.values():
        one["throughput"] = one["tokens_per_s"] / sums["none"]["tokens_per_s"]
    return sums


def preemptions_share(sums: dict[str, dict[str, Any]]) -> float | None:
    """None if the engine preempted nothing without admission either: then nothing was shown."""
    without = sums["none"]["preemptions"]
    return sums["chunks"]["preemptions"] / without if without else None
