"""The threads of torch on a CPU, which a trainer shares with rollout-workers."""

import os


def limit_threads(count: int) -> None:
    """Give torch `count` threads (0: its own choice) that sleep while they wait. To be called before torch is imported.

    By default OpenMP's threads spin at each barrier, and take their cores from whoever else computes: beside busy
    processes, a training step then costs several times the CPU time.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    import torch

    if count:
        torch.set_num_threads(count)
