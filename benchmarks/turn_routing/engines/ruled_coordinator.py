"""A coordinator that places turns by the rule that a file names, so that one fleet can serve blocks under each.

All else is the coordinator's own: versions, streams, moves, the store. `RULE_FILE` in the environment names the file.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, TypeAlias
from unittest.mock import patch

from benchmarks.rivals.turns.spreading_policies import LeastLoadedTurns, StickyTurns
from ebbtide.coordinator.__main__ import main as coordinator_main
from ebbtide.coordinator.dispatch.dispatch_round import SlotFill
from ebbtide.coordinator.rules.placement import Placement
from ebbtide.coordinator.state.run_state import RunState
from ebbtide.coordinator.state.worker_session import WorkerSession

RULE_FILE: Final = "EBBTIDE_BENCHMARK_RULE_FILE"
#: The coordinator's own rule.
OURS: Final = "ebbtide"
RULES: Final = (OURS, "least_loaded", "sticky")
#: Places queued rollouts of a run on engines, now; None: the coordinator's own rule does.
Rule: TypeAlias = Callable[[RunState, Sequence[WorkerSession], float], list[Placement] | None]


class NamedRule:
    """Places by the rule that the file names now."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._rivals = {"least_loaded": LeastLoadedTurns(), "sticky": StickyTurns()}

    def __call__(self, run: RunState, engines: Sequence[WorkerSession], now: float) -> list[Placement] | None:
        rival = self._rivals.get(self._file.read_text())
        return None if rival is None else rival.place(run, engines, now)


@contextmanager
def placing_by(rule: Rule) -> Iterator[None]:
    """Coordinators of this process place by the rule, but for rounds in which it has no answer."""
    ours = SlotFill.place

    def ruled(self: SlotFill, now: float) -> list[Placement]:
        engines = [session for session, worker in self._views.of(self.run, now) if not worker.shut]
        placed = rule(self.run, engines, now)
        return ours(self, now) if placed is None else placed

    with patch.object(SlotFill, "place", ruled):
        yield


def main(argv: Sequence[str] | None = None) -> None:
    """Serve as a coordinator does, under the rule that the file names."""
    with placing_by(NamedRule(Path(os.environ[RULE_FILE]))):
        coordinator_main(argv)


if __name__ == "__main__":
    main()
