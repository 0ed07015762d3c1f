"""Has the crowd's decisions made in virtual time, in processes of their own."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any, Final

from benchmarks.control_plane.house import ROOT
from benchmarks.scale.plan import ScalePlan

#: A fleet whose rollouts end, for the memory that they leave.
_SMALL: Final = {"workers": 8, "slots": 64, "queued": 512, "runs": 2, "seconds": 1.0, "rate": 640.0, "finished": 8000}


async def in_virtual_time(plan: ScalePlan) -> dict[str, Any]:
    """What the plan's fleet does, and what a small one leaves behind. Raises `RuntimeError` if the simulation fails."""
    whole: dict[str, float] = {"workers": plan.workers, "slots": plan.slots, "queued": plan.queued, "runs": plan.runs}
    return {
        "crowd": await _simulated(whole | {"seconds": plan.virtual_s, "rate": plan.rate / plan.workers}),
        "growth": await _simulated(_SMALL),
    }


async def _simulated(options: Mapping[str, float]) -> dict[str, Any]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.simulation.crowd"),
        *(f"--{name}={value}" for name, value in options.items()),
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    said, wrong = await process.communicate()
    if process.returncode:
        raise RuntimeError(f"the simulation failed: {wrong.decode()[-2000:]}")
    found: dict[str, Any] = json.loads(said.splitlines()[-1])
    return found
