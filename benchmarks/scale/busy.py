"""A process that takes a share of a core, as a neighbour on the machine does."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

#: It computes for its share of each of these.
_TURN_S: Final = 0.1
_BUSY: Final = """
import sys, time
share, turn = float(sys.argv[1]), float(sys.argv[2])
while True:
    began = time.process_time()
    while time.process_time() - began < share * turn:
        pass
    time.sleep((1 - share) * turn)
"""


@contextmanager
def busy(share: float) -> Iterator[None]:
    """Take so large a share of a core; 0: nothing."""
    if not share:
        yield
        return
    process = subprocess.Popen([sys.executable, "-c", _BUSY, str(share), str(_TURN_S)])
    try:
        yield
    finally:
        process.kill()
        process.wait()
