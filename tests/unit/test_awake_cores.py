"""The benchmark's idle-class processes: they yield to everything, stay on their cores, and are gone afterwards."""

import os

import psutil

from benchmarks.simulator.awake_cores import awake_cores


def test_each_core_has_one_process_that_runs_only_if_nothing_else_does() -> None:
    core = min(os.sched_getaffinity(0))
    before = {child.pid for child in psutil.Process().children()}
    with awake_cores([core]):
        (spinner,) = [child for child in psutil.Process().children() if child.pid not in before]
        assert os.sched_getscheduler(spinner.pid) == os.SCHED_IDLE
        assert spinner.cpu_affinity() == [core]
    assert not psutil.pid_exists(spinner.pid)
