"""A coordinator that places turns by the rule that a file names, so that one fleet can serve blocks under each.

All else is the coordinator's own: versions, streams, moves, the store. `RULE_FILE` in the environment names the file.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from benchmarks.rivals.turns.spreading_policies import LeastLoadedTurns, StickyTurns
from ebbtide.coordinator.__main__ import serve
from ebbtide.coordinator.dispatcher.dispatch_rules import DispatchRules
from ebbtide.coordinator.settings import CoordinatorSettings
from ebbtide.coordinator.state.run_state import RunState
from ebbtide.coordinator.state.worker_session import WorkerSession
from ebbtide.runtime import run as run_service
from ebbtide.scheduling.dispatch.placement import Placement
from ebbtide.settings import load

RULE_FILE: Final = "EBBTIDE_BENCHMARK_RULE_FILE"
#: The coordinator's own rule.
OURS: Final = "ebbtide"
RULES: Final = (OURS, "least_loaded", "sticky")


class NamedRule:
    """Places by the rule that the file names now."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._rivals = {"least_loaded": LeastLoadedTurns(), "sticky": StickyTurns()}

    def __call__(self, run: RunState, engines: Sequence[WorkerSession], now: float) -> list[Placement] | None:
        rival = self._rivals.get(self._file.read_text())
        return None if rival is None else rival.place(run, engines, now)


def main(argv: Sequence[str] | None = None) -> None:
    """Serve as a coordinator does, under the rule that the file names."""
    rules = DispatchRules(rival=NamedRule(Path(os.environ[RULE_FILE])))
    settings = load(CoordinatorSettings, prog="ruled coordinator", argv=argv, description=main.__doc__ or "")
    run_service(lambda shutdown: serve(settings, shutdown, rules), "coordinator", settings)


if __name__ == "__main__":
    main()
