"""Has the simulator play what was measured: real settings, and the decisions of a live run."""

import tempfile
from pathlib import Path

from msgspec import Struct

from benchmarks.simulator.measured import Measured
from benchmarks.simulator.real_scenario import real_scenario
from benchmarks.simulator.real_settings import RealSession
from benchmarks.simulator.recorded_run import replayed_run
from ebbtide.simulator.outcome import Outcome
from ebbtide.simulator.simulate import simulate


class PlacementCount(Struct, frozen=True, kw_only=True):
    placements: int  # of the live run
    equal: int  # that the simulator took, too
    first_difference: str = ""


def simulated_setting(measured: Measured, session: RealSession) -> Outcome:
    """Simulates a measured setting, with profiles fitted to what `fitting_inputs` makes of the session.

    The simulated run gets the very lengths of each response, and each interruption at its time within its step.
    """
    with tempfile.TemporaryDirectory(prefix="ebb-real-") as folder:
        scenario = real_scenario(measured, session, Path(folder))
        return simulate(scenario, seed=session.seed)


def equal_placements() -> PlacementCount:
    """Records a live run with two kills and a drain, and counts the placements that the simulator takes alike."""
    report = replayed_run()
    difference = report.first_difference
    return PlacementCount(
        placements=report.placements,
        equal=report.placements_equal,
        first_difference=str(difference) if difference is not None else "",
    )
