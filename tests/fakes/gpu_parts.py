"""Parts of a half that do what parts do, for tests of what runs them."""

import subprocess
import sys
import time

from benchmarks.gpu_parts.harness import PartRun, PartSkipped


def well(run: PartRun) -> None:
    run.tell(device=run.device, small=run.small)


def tells_and_fails(run: PartRun) -> None:
    run.tell(before="known")
    raise ValueError("of no use")


def has_no_end(run: PartRun) -> None:
    """Leaves the process id of a child that would go on."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    run.tell(child=child.pid)
    time.sleep(600)


def cannot(run: PartRun) -> None:
    raise PartSkipped("there is nothing to measure")
