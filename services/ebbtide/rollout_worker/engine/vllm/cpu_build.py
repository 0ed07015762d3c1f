"""Prepares processes for a CPU build of vLLM, and for no other build."""

import ctypes
import os
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

from ebbtide.errors import InvalidRequest

#: vLLM's own default on CPUs is a share of all memory, too much for a machine with several processes.
_KV_CACHE_MIB: Final = 512
#: Niceness of an engine's process above its worker's: on a full machine, storing tokens goes before making others.
_NICER: Final = 5
#: The largest layer whose memory an engine process keeps for the next one, and the most that it keeps.
_KEPT: Final = 256 << 20
#: From glibc's malloc.h.
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
#: Needs one process less than vLLM's choice, which exists to bind OpenMP threads; `threads` sets their number.
_IN_ENGINE_CORE: Final = "vllm.v1.executor.uniproc_executor.UniProcExecutor"


def is_cpu_build() -> bool:
    """Whether the installed vLLM chooses its CPU platform, by its own rule. Raises `InvalidRequest`."""
    try:
        return "cpu" in version("vllm")
    except PackageNotFoundError:
        raise InvalidRequest("vLLM is not installed: install ebbtide[worker]", field="engine") from None


def set_environment(threads: int) -> None:
    """Prepare this process and its children. Must come before torch is imported: OpenMP reads its threads then."""
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    if threads:
        os.environ["OMP_NUM_THREADS"] = str(threads)


def keep_freed_memory() -> None:
    """Let the C library keep the memory that an engine process frees: a reload allocates and frees layer after layer,
    and spent a third of its time on new pages."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):  # some C libraries lack it
        libc.mallopt(_M_MMAP_THRESHOLD, _KEPT)
        libc.mallopt(_M_TRIM_THRESHOLD, _KEPT)


def yield_to(worker: int) -> None:
    """Give the process `worker` priority over this one and over the threads that it will start."""
    os.setpriority(os.PRIO_PROCESS, 0, min(19, os.getpriority(os.PRIO_PROCESS, worker) + _NICER))


def engine_arguments(threads: int, tensor_parallel_size: int, kv_cache_mib: int) -> dict[str, Any]:
    """Engine arguments that suit CPUs; explicit ones of the user win over them."""
    arguments: dict[str, Any] = {"kv_cache_memory_bytes": (kv_cache_mib or _KV_CACHE_MIB) << 20}
    if threads and tensor_parallel_size == 1:
        arguments["distributed_executor_backend"] = _IN_ENGINE_CORE
    return arguments


def start_by_spawn() -> None:
    """Let the engine core be spawned: this process has threads by now, which do not survive a fork."""
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"


def start_by_fork() -> None:
    """Let the engine core be forked, not spawned: shared imports halve boot time and memory.

    Sound only with one OpenMP thread (the child would believe to have the pool of several), and before gRPC is used.
    Called between the engine's configuration, which demands spawn, and its start.
    """
    import torch

    if torch.get_num_threads() == 1:
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
