"""Makes a vLLM engine a borrowed one: arguments, environment, and a budget of its own while it boots."""

import math
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from ebbtide.errors import InvalidRequest
from ebbtide.grants import Page
from ebbtide.rollout_worker.engine import checkpoint_facts
from ebbtide.rollout_worker.engine.vllm.cpu_build import is_cpu_build
from ebbtide.rollout_worker.settings import VllmSettings
from ebbtide.types.grants import Budget

#: What an engine needs on a device beside weights and KV cache: its context, graphs, and what a step allocates. An
#: estimate, that no GPU has confirmed yet.
BESIDE_BYTES: Final = 2 * 10**9
_WIDE: Final = ("float32", "float")
#: Variable with the path of the page, for the engine core's process.
PAGE: Final = "EBBTIDE_GRANT_PAGE"
#: Time for the one token of a warm-up.
_WARM_UP_S: Final = 120.0
_SCHEDULER: Final = "ebbtide.rollout_worker.engine.vllm.schedulers.BudgetedScheduler"
_ARGS: Final = "vllm.engine_args"
#: vLLM's arguments that the scheduler and its balloon do not support, with the reason.
_REFUSED: Final = {
    "pipeline_parallel_size": "it has several steps under way at once",
    "enable_dbo": "it has several steps under way at once",
    "speculative_config": "its drafts are tokens that no budget counts",
    "spec_method": "its drafts are tokens that no budget counts",
    "spec_model": "its drafts are tokens that no budget counts",
    "spec_tokens": "its drafts are tokens that no budget counts",
    "diffusion_config": "it makes tokens by other steps than those that are budgeted",
    "kv_transfer_config": "a KV cache elsewhere is not given back with the rest",
    "kv_offloading_size": "a KV cache elsewhere is not given back with the rest",
    "ec_transfer_config": "what a connector keeps is not given back with the rest",
}


class BorrowedEngine:
    """An engine that computes while the page at `path` has a budget and a lease."""

    def __init__(self, path: Path, step_tokens: int) -> None:
        """Makes the page if there is none. Raises `InvalidRequest` for a file that is no page of this user's own."""
        self.path, self.step_tokens = path, step_tokens
        self.page = Page(path, create=True)
        self.weights_bytes = 0  # on one device; before the start, and without sleep mode, as `learn` estimates
        self.kv_bytes = 0  # on one device; 0: as vLLM finds
        self.device = ""  # NVML's id of the GPU; empty: none

    def arguments(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Adds a borrowed engine's arguments. Raises `InvalidRequest` for those that it cannot have."""
        fixed = {"scheduler_cls": _SCHEDULER, "async_scheduling": False, "max_num_batched_tokens": self.step_tokens}
        for name in fixed:
            if name in arguments:
                raise InvalidRequest(f"{name} is fixed in a borrowed engine: leave it out", field=_ARGS)
        for name, reason in _REFUSED.items():
            if (value := arguments.get(name)) and (name, value) != ("pipeline_parallel_size", 1):
                raise InvalidRequest(f"{name} is not for a borrowed engine ({reason}): leave it out", field=_ARGS)
        if self.step_tokens < arguments["max_num_seqs"]:
            text = f"must be at least the number of slots, {arguments['max_num_seqs']}, which may be in one step"
            raise InvalidRequest(text, field="step_tokens")
        return {**arguments, **fixed}

    @property
    def sleeps(self) -> bool:
        """Whether it gives memory back by vLLM's sleep mode, which is for GPUs and only warns on CPUs."""
        return not is_cpu_build()

    def measured(self, pool_bytes: int) -> None:
        """The booted engine gives so many bytes of a device back when it sleeps."""
        steps = self.page.steps()
        self.weights_bytes = max(0, pool_bytes - steps.kv_total * steps.block_bytes) or self.weights_bytes

    def set_environment(self) -> None:
        """Prepare the engine's processes, forked and spawned. Must come before OpenMP is loaded: its threads would take
        the processor from the served engine by spinning while they wait for work."""
        os.environ[PAGE] = str(self.path.absolute())
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        os.environ.setdefault("KMP_BLOCKTIME", "0")

    def learn(self, root: Path, settings: VllmSettings) -> None:
        """Collect facts for the guard about the engine that will boot from the checkpoint at `root`. Raises
        `InvalidRequest` for an engine on a GPU whose KV cache has no stated size: it could only take what the device's
        owner happens to leave free while it boots."""
        self.weights_bytes = checkpoint_facts.weights_bytes(root)
        if not self.sleeps:
            return
        if not settings.kv_cache_mib:
            raise InvalidRequest(
                "is required for a borrowed engine on a GPU: its memory must be known before it boots, because the "
                "device's owner makes room for that much",
                field="vllm.kv_cache_mib",
            )
        self.device, self.kv_bytes = _device(), settings.kv_cache_mib << 20
        self.weights_bytes = loaded_bytes(root, settings) + BESIDE_BYTES

    def memory_share(self, total: int) -> float:
        """`gpu_memory_utilization` of an engine that has learnt, on a device with `total` bytes: vLLM refuses to boot
        unless this share is free. Raises `InvalidRequest` if the device is too small."""
        needed = self.weights_bytes + self.kv_bytes
        if needed > total:
            raise InvalidRequest(
                f"weights, {self.kv_bytes} bytes of KV cache and {BESIDE_BYTES} bytes beside them are {needed} bytes, "
                f"and the device has {total}; give less, or share the model by tensor_parallel_size",
                field="vllm.kv_cache_mib",
            )
        return needed / total

    @contextmanager
    def warming_up(self) -> Iterator[None]:
        """Give the engine a budget of its own: the boot was permitted as a whole, and its warm-up disturbs the served
        engine no more than the loading of its weights."""
        until = time.monotonic() + _WARM_UP_S
        self.page.write_budget(Budget(self.step_tokens, self.step_tokens, until))
        self.page.renew(until)
        try:
            yield
        finally:
            self.page.renew(0.0)
            self.page.write_budget(Budget())

    def close(self) -> None:
        """Give the lease back, and remove the page unless another worker owns it by now."""
        self.page.renew(0.0)
        self.page.remove(self.path)


def loaded_bytes(root: Path, settings: VllmSettings) -> int:
    """Bytes of the checkpoint's weights on one device, about: as they are stored, or wider if the settings say so."""
    elements = sum(math.prod(shape) for shape in checkpoint_facts.tensor_shapes(root).values())
    stored = checkpoint_facts.weights_bytes(root)
    return max(stored, elements * 4 if settings.dtype in _WIDE else 0) // settings.tensor_parallel_size


def device_bytes() -> int:
    """All bytes of the first GPU that this process may use, read without opening a context on it."""
    from vllm.platforms import current_platform

    return int(current_platform.get_device_total_memory(0))


def _device() -> str:
    """NVML's id of the first GPU that this process may use; empty if there is none."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip()
    if first.startswith(("GPU-", "MIG-")):
        return first
    from vllm.platforms import current_platform

    return str(current_platform.get_device_uuid(0)) if current_platform.is_cuda() else ""
