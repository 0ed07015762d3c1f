"""A fleet in virtual time loses nothing, and is measured. It runs as a process of its own: coroutines of killed workers
protest when they are let go.
"""

import json
import subprocess
import sys

from tests.simulation.crowd import remembered_bytes

PLAN = {"workers": 8, "slots": 4, "queued": 40, "runs": 2, "rate": 40.0, "seconds": 2.0, "finished": 100}


def test_a_small_crowd_works_loses_half_its_workers_and_ends() -> None:
    flags = [part for name, value in PLAN.items() for part in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "tests.simulation.crowd", *flags]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=120)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["tokens_lost"] == 0
    assert found["finished"] >= 72 + 100
    assert 0 < found["decision_p99_ms"] <= found["decision_max_ms"]
    assert found["coordinator_bytes_per_open"] > 0


def test_the_bytes_of_an_object_are_those_of_all_that_it_leads_to() -> None:
    class Holder:
        def __init__(self, kept: list[bytes]) -> None:
            self.kept = kept

    small = remembered_bytes(Holder([]))
    assert remembered_bytes(Holder([bytes(1000), bytes(1001)])) - small >= 2001
    assert remembered_bytes(Holder([b"x" * 1000] * 100)) - small < 3000, "each object once"
