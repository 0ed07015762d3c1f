"""`python -m tests [PHASE ...] [options of pytest]`: all tests, in phases, each as fast as two cores allow.

`unit`: on two processes. `services`: all others on three, as they often wait; a file of tests in one of them.
`alone`: what measures time or processors, one test after another. A phase in which no test is left is no failure.
"""

import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Final

import pytest

_BY_DEFAULT: Final = "not nightly and not hosts and not bare and not extras and not integrations and not slurm"
#: The longest first, and last what is dealt out test by test: so all processes end at the same time.
_SERVICES: Final = tuple(
    f"tests/{name}" for name in ("e2e", "simulation", "upgrade", "integration", "http_fuzz", "chaos")
)
_UNIT: Final = ("tests/unit", "-n", "2", "--dist", "worksteal")
_BY_FILE: Final = ("-n", "3", "--dist", "loadfile", "--no-loadscope-reorder")
PHASES: Final = {
    "unit": (*_UNIT, "-m", f"{_BY_DEFAULT} and not alone"),
    "services": (*_SERVICES, *_BY_FILE, "-m", f"{_BY_DEFAULT} and not alone"),
    "alone": ("tests", "-m", f"{_BY_DEFAULT} and alone"),
}
_FINE: Final = {pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED}


def main(arguments: Sequence[str]) -> int:
    """Run the phases that are named, or all; the number of those that failed is the exit code."""
    named = [name for name in arguments if name in PHASES]
    options = [argument for argument in arguments if argument not in PHASES]
    failed, said = 0, []
    for name in named or PHASES:
        began = time.monotonic()
        done = subprocess.run([sys.executable, "-m", "pytest", *PHASES[name], *options], check=False)
        failed += done.returncode not in _FINE
        word = "passed" if done.returncode in _FINE else f"failed ({done.returncode})"
        said.append(f"{name:<10} {word:<12} {time.monotonic() - began:6.0f} s")
        if done.returncode == pytest.ExitCode.INTERRUPTED:
            break
    sys.stdout.write("\n".join([*said, ""]))
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
