"""Patches beside what else is in use: bytes, speed and memory, on real consecutive policies and synthetic ones."""

from benchmarks.patches.level import run_level

__all__ = ["run_level"]
