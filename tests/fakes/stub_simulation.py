"""Stands for the simulation of a seed, in a process of its own.

The scenario's name says what it does: `steps`, `refused`, `crash`, `fault`, `endless`, `deaf` or `chatty`.
"""

import os
import signal
import sys
from pathlib import Path

from ebbtide.errors import InvalidRequest
from ebbtide.simulator.outcome import Outcome, SimulationProgress
from ebbtide.simulator.seed_processes import Say
from ebbtide.simulator.simulate import SeedTask
from ebbtide.telemetry import get_logger
from tests.fakes.simulated_outcomes import outcome


def simulate(task: SeedTask, say: Say) -> Outcome:
    say(SimulationProgress(at_s=900.0, until_s=3600.0, steps=1))
    match Path(task.scenario).stem:
        case "refused":
            raise InvalidRequest("x.toml:3:1: must be above 0; write 1 or more", field="")
        case "crash":
            sys.exit(7)
        case "endless" | "deaf" as mode:
            if mode == "deaf":
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
            Path(f"{task.scenario}.{task.seed}.pid").write_text(str(os.getpid()))
            while True:
                signal.pause()
        case "fault":
            raise ZeroDivisionError("a defect of the simulator")
        case "chatty":
            get_logger(__name__).info("a decision", of="the coordinator")
            print("a library prints this to stdout")  # noqa: T201
            for second in range(10_000):
                say(SimulationProgress(at_s=float(second), until_s=10_000.0))
        case _:
            pass
    return outcome(task.seed, scenario=task.scenario, slower=1.0 + task.seed)
