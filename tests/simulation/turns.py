"""How long a run may wait for its turn at the workers, and how soon workers let go of a run that is over."""

import math
from collections.abc import Callable
from typing import Final

from tests.simulation.loop import Proc, SimLoop
from tests.simulation.monitor import Monitor
from tests.simulation.run_view import RunView

#: A run with work gets a token at least so often: turns last some seconds, and before one a worker pulls and installs
#: the run's weights. A borrowed worker's host may take itself back meanwhile, for 20 s.
_STARVED_S: Final = 30.0
#: A worker that could hear of a run's end goes on with it for no longer.
_LETS_GO_S: Final = 3.0


class Turns:
    """`well`: whether all that serves a run is well, and has been since so many seconds."""

    def __init__(self, loop: SimLoop, monitor: Monitor, well: Callable[[float], bool]) -> None:
        self._loop, self._monitor, self._well = loop, monitor, well
        self._served = dict.fromkeys(monitor.runs, 0.0)  # when the run got a token last, or had no work

    def token(self, _proc: Proc, run: RunView) -> None:
        self._served[run.run_id] = self._loop.now

    def look(self) -> None:
        now, busy = self._loop.now, self._with_work()
        for run_id, since in self._served.items():
            if run_id not in busy:
                self._served[run_id] = now
                continue
            if now - since > _STARVED_S and self._well(now - since):
                self._monitor.fail(f"{run_id} has work and got no token since {since:.2f} s, though all is well")

    def _with_work(self) -> set[str]:
        return {
            one.run.run_id
            for one in self._monitor.rollouts.values()
            if one.state in {"queued", "running"} and one.run.over_at == math.inf
        }

    def lets_go(self, proc: Proc, run: RunView, at_peace: Callable[[Proc, float], bool]) -> None:
        """A worker made a token of a run."""
        late = self._loop.now - run.over_at
        if late > _LETS_GO_S and at_peace(proc, late):
            self._monitor.fail(f"{proc} still generates for {run.run_id}, which was over at {run.over_at:.2f} s")
