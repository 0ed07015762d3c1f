"""Makes `tests.integration.cli.stand_ins` importable, for tests and for the processes that they start."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[3]))
