"""How long a new version takes to eight workers behind one slow link, and what crosses it."""

from benchmarks.distribution.level import run_level

__all__ = ["run_level"]
