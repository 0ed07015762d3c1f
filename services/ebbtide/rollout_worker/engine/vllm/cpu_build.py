"""What a CPU build of vLLM needs in the environment. Nothing of it is set for any other build."""

import ctypes
import os
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

from ebbtide.errors import InvalidRequest

#: vLLM's own default on CPUs is a share of all memory, which a machine with several processes does not have.
_KV_CACHE_MIB: Final = 512
#: How much nicer an engine's process is than its worker's: with no core to spare, tokens must not wait for the making
#: of others before they are stored.
_NICER: Final = 5
#: The largest layer whose memory an engine process keeps for the next one, and how much it keeps at most.
_KEPT: Final = 256 << 20
#: From glibc's malloc.h.
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
#: One process less than vLLM's choice, which exists to bind OpenMP threads; `threads` says how many there are.
_IN_ENGINE_CORE: Final = "vllm.v1.executor.uniproc_executor.UniProcExecutor"


def is_cpu_build() -> bool:
    """Whether the installed vLLM chooses its CPU platform, by the rule that it uses itself. Raises
    `InvalidRequest`."""
    try:
        return "cpu" in version("vllm")
    except PackageNotFoundError:
        raise InvalidRequest("vLLM is not installed: install ebbtide[worker]", field="engine") from None


def set_environment(threads: int) -> None:
    """Prepare this process and those below it. Must come before torch is imported: OpenMP reads its threads then."""
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    if threads:
        os.environ["OMP_NUM_THREADS"] = str(threads)


def keep_freed_memory() -> None:
    """Let the C library keep the memory that an engine process frees: a reload allocates and frees layer after layer,
    and to have each page made anew took a third of its time."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):  # not every C library has it
        libc.mallopt(_M_MMAP_THRESHOLD, _KEPT)
        libc.mallopt(_M_TRIM_THRESHOLD, _KEPT)


def yield_to(worker: int) -> None:
    """Let the process `worker` go before this one, and before the threads that this one will start."""
    os.setpriority(os.PRIO_PROCESS, 0, min(19, os.getpriority(os.PRIO_PROCESS, worker) + _NICER))


def engine_arguments(threads: int, tensor_parallel_size: int, kv_cache_mib: int) -> dict[str, Any]:
    """Engine arguments that suit CPUs; explicit ones of the user win over them."""
    arguments: dict[str, Any] = {"kv_cache_memory_bytes": (kv_cache_mib or _KV_CACHE_MIB) << 20}
    if threads and tensor_parallel_size == 1:
        arguments["distributed_executor_backend"] = _IN_ENGINE_CORE
    return arguments


def start_by_spawn() -> None:
    """Let the engine core be a process of its own making: this one has threads by now, which no fork lives through."""
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"


def start_by_fork() -> None:
    """Let the engine core be forked, not spawned: all imports are shared then, which halves boot time and memory.

    Sound with one OpenMP thread only (more than one leaves a pool that the child believes to have), and before gRPC is
    used. Called between the engine's configuration, which demands spawn, and its start.
    """
    import torch

    if torch.get_num_threads() == 1:
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
