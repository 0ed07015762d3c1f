"""Limits the threads of torch on a CPU that a trainer shares with rollout-workers."""

import os


def limit_threads(count: int) -> None:
    """Gives torch `count` threads (0: its own choice) that sleep while they wait. Call it before importing torch.

    By default OpenMP's threads spin at each barrier: beside busy processes, a training step then costs several times
    the CPU time.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    import torch

    if count:
        torch.set_num_threads(count)
