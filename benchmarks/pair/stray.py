"""Takes 10 to 50 % of a core at random: a stray process beside both engines, as machines have them.

    python -m benchmarks.pair.stray SEED

The share is drawn anew for each spell of some seconds, and is of the core's time: where others want the core too, a
burst lasts longer. The same seed gives the same spells. The process ends with the one that started it.
"""

import os
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Final

import psutil

from benchmarks.pair.virtual.pair_costs import StrayProcess
from ebbtide.local_cluster.launcher import Program, ProgramProcess, tethered

#: The spells and bursts of the modelled one.
STRAY: Final = StrayProcess(least=0.1, most=0.5)
_ROOT: Final = Path(__file__).parents[2]


class StrayMeter:
    """Measures the share of a core that a process takes."""

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)
        self._began, self._before_s = time.monotonic(), self._used_s()

    @property
    def share(self) -> float:
        """Since the meter was made."""
        return (self._used_s() - self._before_s) / max(1e-9, time.monotonic() - self._began)

    def _used_s(self) -> float:
        times = self._process.cpu_times()
        return float(times.user + times.system)


@asynccontextmanager
async def stray_process(directory: Path, seed: int) -> AsyncIterator[StrayMeter]:
    """Run one until the block is left."""
    program = Program(
        name="stray",
        command=tethered(sys.executable, "-m", "benchmarks.pair.stray", str(seed)),
        environment={**os.environ, "PYTHONPATH": str(_ROOT)},
        log=directory / "stray.log",
    )
    process = ProgramProcess(program)
    try:
        yield StrayMeter(process.pid)
    finally:
        process.kill()


def main() -> None:
    seed = sys.argv[1]
    spells, bursts = Random(f"{seed} spells"), Random(f"{seed} bursts")
    while True:
        share = spells.uniform(STRAY.least, STRAY.most)
        spell(share, spells.expovariate(1.0 / STRAY.spell_s), bursts)


def spell(share: float, seconds: float, bursts: Random) -> None:
    """Take so much of a core for so long."""
    began, used_s = time.monotonic(), time.process_time()
    while time.monotonic() - began < seconds:
        end = time.process_time() + bursts.expovariate(1.0 / STRAY.burst_s)
        while time.process_time() < end:
            pass
        passed = time.monotonic() - began
        time.sleep(max(0.0, min((time.process_time() - used_s) / share, seconds) - passed))


if __name__ == "__main__":
    main()
