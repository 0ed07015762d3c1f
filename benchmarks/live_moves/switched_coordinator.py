"""A coordinator whose moves of running rollouts a file switches on and off, so that one fleet serves both arms.

All else is the coordinator's own: it learns speeds, places, and hands over in either arm. `SWITCH_FILE` in the
environment names the file.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

from ebbtide.coordinator.__main__ import main as coordinator_main
from ebbtide.coordinator.dispatch.rebalancer import Rebalancer

SWITCH_FILE: Final = "EBBTIDE_BENCHMARK_SWITCH_FILE"
ON: Final = "on"
OFF: Final = "off"


def main(argv: Sequence[str] | None = None) -> None:
    """Serve as a coordinator does, and move rollouts while the file says so."""
    switch, decide = Path(os.environ[SWITCH_FILE]), Rebalancer.decide

    def switched(self: Rebalancer, *args: Any, **named: Any) -> None:
        if switch.read_text() == ON:
            decide(self, *args, **named)

    with patch.object(Rebalancer, "decide", switched):
        coordinator_main(argv)


if __name__ == "__main__":
    main()
