"""Runs a serving engine on this machine: vLLM's OpenAI server, unmodified, as a program of the launcher."""

import os
import sys
import urllib.error
import urllib.request
from importlib.metadata import version
from pathlib import Path
from typing import Final

from ebbtide.local_cluster.gpu_placement import DeviceShare
from ebbtide.local_cluster.host_resources import checkpoint_size
from ebbtide.local_cluster.launcher import Program, tethered

#: Waiting threads must sleep where two engines share cores: spinning ones make both fifty times slower.
_SHARED_CORES: Final = {
    "OMP_WAIT_POLICY": "PASSIVE",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
}
_QUIET: Final = {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
#: Our plugin ties the engine's process to the server's: nothing else ends it when the server is killed.
_TIED: Final = {"EBBTIDE_ENGINE_TIED": "1"}
_CPU: Final = (
    "--enforce-eager",
    "--distributed-executor-backend", "vllm.v1.executor.uniproc_executor.UniProcExecutor",
)  # fmt: skip
_HEALTH_S: Final = 1.0
#: vLLM's server imports and compiles more than a worker does.
_COMPILE_S: Final = 60.0


def serving_engine(
    model: Path,
    served_name: str,
    address: str,
    log: Path,
    *,
    threads: int = 0,
    kv_mib: int = 0,
    share: DeviceShare | None = None,
    dtype: str = "bfloat16",
    stage: int = 0,
    name: str = "serving",
) -> Program:
    """Returns the server of `model` at `address` (host:port); it is ready once it answers.

    `threads` and `dtype`: of a CPU engine; 0 threads: as cores. `kv_mib`: memory for keys and values; 0: vLLM's choice.
    `share`: its part of the GPUs; None: all of those that this process sees.
    """
    host, _, port = address.rpartition(":")
    on_cpu = "cpu" in version("vllm")
    command = (
        sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model), "--served-model-name", served_name,
        "--host", host, "--port", port, "--max-model-len", "8192", "--max-num-seqs", "64",
        "--disable-uvicorn-access-log", *((*_CPU, "--dtype", dtype) if on_cpu else ()),
    )  # fmt: skip
    if share is not None and share.kv_cache_mib:
        kv_mib = kv_mib or share.kv_cache_mib
        command += ("--gpu-memory-utilization", str(share.utilization))
    if kv_mib:
        command += ("--kv-cache-memory-bytes", str(kv_mib << 20))
    cpu = _SHARED_CORES | {"OMP_NUM_THREADS": str(threads or os.cpu_count() or 1)} if on_cpu else {}
    return Program(
        name=name,
        command=tethered(*command),
        environment={**os.environ, **_QUIET, **_TIED, **cpu, **(share.environment if share else {})},
        log=log,
        ready=lambda: address if answers(address) else None,
        stage=stage,
        boot_s=_COMPILE_S + checkpoint_size(model).boot_s,
    )


def answers(address: str) -> bool:
    """Whether the server there reports that it is healthy."""
    try:
        with urllib.request.urlopen(f"http://{address}/health", timeout=_HEALTH_S) as response:
            return bool(response.status == 200)
    except (OSError, urllib.error.URLError):
        return False
