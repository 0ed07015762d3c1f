"""Level (a) of the migration benchmark: whole spot traces in simulated time, on the coordinator's own rules."""

from benchmarks.replay.report import table
from benchmarks.replay.run import run_level, unknown
from benchmarks.replay.setting import Setting

__all__ = ["Setting", "run_level", "table", "unknown"]
