"""Has the crowd's decisions made in virtual time, in a process of its own."""

import asyncio
import json
import os
import subprocess
import sys
from typing import Any

from benchmarks.control_plane.house import ROOT
from benchmarks.scale.plan import ScalePlan


async def in_virtual_time(plan: ScalePlan) -> dict[str, Any]:
    """What `python -m tests.simulation.crowd` finds. Raises `RuntimeError` with its words if it fails."""
    options: dict[str, float] = {"workers": plan.workers, "slots": plan.slots, "queued": plan.queued, "runs": plan.runs}
    options |= {"seconds": plan.virtual_s, "rate": plan.rate / plan.workers}
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
