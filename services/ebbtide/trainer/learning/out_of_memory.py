"""Ends a run that does not fit into its device's memory, and says what would make it fit.

A step that ran out of memory does so again after every restart, on the same trajectories. So the run fails, and its
reason names the settings that decide on memory, with their values and bytes.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

import torch
import torch.distributed

from ebbtide.run_client import RunFailed

_GIB: Final = 1 << 30
_CUDA_MEMORY_ALLOCATION: Final = 2  # cudaErrorMemoryAllocation
#: Most of torch's own text that is repeated.
_TEXT: Final = 300


class OutOfMemory(RunFailed):
    """The run does not fit into the memory of a trainer's device. With several ranks they are out of step, and end."""


class MemoryKnobs(NamedTuple):
    """What decides on the memory of a step."""

    micro_batch_tokens: int
    longest: int  # tokens of the step's longest sample; 0: no samples were computed
    moments: int  # bytes of the optimiser's moments on the device; 0: they are in host memory
    float32: bool  # computes in float32 though the device has bfloat16
    plain: bool  # keeps all activations of a micro-batch
    ranks: int


def remedies(knobs: MemoryKnobs) -> list[str]:
    """Returns what would need less memory, the cheapest first."""
    found = []
    if knobs.longest:
        found.append(_fewer_tokens(knobs))
    if knobs.float32:
        found.append('set trainer.dtype = "bfloat16"')
    if knobs.plain:
        found.append("set trainer.gradient_checkpointing = true, which keeps only what enters each layer")
    if knobs.moments:
        freed = f"{knobs.moments / _GIB:.1f} GiB of each GPU"
        found.append(f"set offload of the trainer (EBBTIDE_OFFLOAD=true), which frees {freed}")
    found.append(f"take more ranks than {knobs.ranks}")
    return found


def _fewer_tokens(knobs: MemoryKnobs) -> str:
    if knobs.longest < knobs.micro_batch_tokens:
        least = f"no sample had more than {knobs.longest} tokens"
        return f"lower trainer.micro_batch_tokens ({knobs.micro_batch_tokens}); {least}"
    own = f"a sample of {knobs.longest} tokens is a micro-batch of its own whatever trainer.micro_batch_tokens is"
    return f"lower sampling.max_tokens, as {own} ({knobs.micro_batch_tokens})"


def explain(what: str, where: str, error: str, knobs: MemoryKnobs) -> str:
    """Words the reason of a run that failed: `what` ran out of the memory of `where`, as torch's `error` says."""
    said = " ".join(error.split())[:_TEXT]
    ways = "; or ".join(remedies(knobs))
    return f"{what} ran out of memory on {where}: {ways}. torch says: {said}"


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether a device's memory ran out: torch's allocator says so by its error's kind, CUDA by a code, cuBLAS by the
    name of its status, and NCCL by words alone."""
    if isinstance(error, torch.AcceleratorError):
        return getattr(error, "error_code", 0) == _CUDA_MEMORY_ALLOCATION
    if isinstance(error, torch.distributed.DistError):
        return "out of memory" in str(error)
    return isinstance(error, torch.OutOfMemoryError) or "CUBLAS_STATUS_ALLOC_FAILED" in str(error)


@contextlib.contextmanager
def naming_knobs(what: str, device: str, knobs: Callable[[], MemoryKnobs]) -> Iterator[None]:
    """Raises `OutOfMemory` with the remedies for torch's error."""
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise OutOfMemory(explain(what, _place(device), str(error), knobs())) from None


def _place(device: str) -> str:
    if not device.startswith("cuda") or not torch.cuda.is_available():
        return device
    free, total = torch.cuda.mem_get_info(device)
    own = torch.cuda.memory_allocated(device)
    used = f"{own / _GIB:.1f} GiB of its {total / _GIB:.1f} were the trainer's tensors, and {free / _GIB:.1f} were free"
    return f"{device} ({used})"
