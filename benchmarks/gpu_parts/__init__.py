"""The parts of `benchmarks/gpu.py`: each runs in a process of its own, and imports what it needs only there."""
