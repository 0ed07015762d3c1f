"""A measurement's class in the kernel: programs inherit it, and it ends with the measurement."""

import os
import subprocess
import sys
from threading import Thread

from benchmarks.real_time import above_the_measured, real_time

_CLASS = "import os; print(os.sched_getscheduler(0), os.sched_getparam(0).sched_priority)"


def test_programs_and_threads_of_a_measurement_have_its_class_where_that_is_permitted() -> None:
    before = os.sched_getscheduler(0)
    turns: list[tuple[int, int]] = []

    def take_turns() -> None:
        above_the_measured()
        turns.append((os.sched_getscheduler(0), os.sched_getparam(0).sched_priority))

    with real_time() as permitted:
        program = subprocess.run([sys.executable, "-c", _CLASS], check=True, capture_output=True, text=True)
        thread = Thread(target=take_turns)
        thread.start()
        thread.join()
    expected = [(os.SCHED_RR, 1), (os.SCHED_RR, 2)] if permitted else [(before, 0)] * 2
    assert [tuple(map(int, program.stdout.split())), *turns] == expected
    assert os.sched_getscheduler(0) == before
