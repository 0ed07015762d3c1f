"""Sends generated HTTP messages through the guard's proxy to an independent parser, in processes of their own."""

import asyncio
import json
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

from benchmarks.control_plane.house import ROOT
from benchmarks.scale.plan import ScalePlan

_JOBS: Final = 2


async def fuzz_http(plan: ScalePlan) -> dict[str, Any]:
    """In how many of the plan's cases both ends disagree, or one hangs. Raises `RuntimeError` if the fuzzer fails."""
    with tempfile.TemporaryDirectory(prefix="ebb-http-") as folder:
        told = Path(folder) / "http.json"
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.http_fuzz", "--jobs", str(_JOBS)),
            *("--cases", str(plan.http_cases), "--output", str(told)),
            cwd=ROOT,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        said, _ = await process.communicate()
        if not told.exists():
            raise RuntimeError(f"the fuzzer failed: {said.decode()[-2000:]}")
        found = json.loads(told.read_text())
    figures = found["figures"]
    return {
        "http_disagreements": figures["http_disagreements"] + figures["http_hangs"],
        "http_cases": figures["http_cases"],
        "http_memory_growth_mib": figures["memory_growth_mib"],
        "http_wrong": found["wrong"],
        "http_hung": found["hung"],
    }
