"""Makes a vLLM engine a borrowed one: arguments, environment, and a budget of its own while it boots."""

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from ebbtide.errors import InvalidRequest
from ebbtide.grants import Page
from ebbtide.rollout_worker.engine.vllm.cpu_build import is_cpu_build
from ebbtide.types.grants import Budget

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
    "kv_transfer_config": "keys and values elsewhere are not given back with the others",
    "kv_offloading_size": "keys and values elsewhere are not given back with the others",
    "ec_transfer_config": "what a connector keeps is not given back with the rest",
}


class BorrowedEngine:
    """An engine that computes while the page at `path` has a budget and a lease."""

    def __init__(self, path: Path, step_tokens: int) -> None:
        """Makes the page if there is none. Raises `InvalidRequest` for a file that is no page of this user's own."""
        self.path, self.step_tokens = path, step_tokens
        self.page = Page(path, create=True)
        self.weights_bytes = 0  # on one device; without sleep mode, of the checkpoint
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

    def learn(self, root: Path) -> None:
        """Collect facts for the guard about the engine that boots from the checkpoint at `root`."""
        self.weights_bytes = sum(file.stat().st_size for file in root.glob("*.safetensors"))
        self.device = "" if is_cpu_build() else _device()

    @contextmanager
    def warming_up(self) -> Iterator[None]:
        """Give the engine a budget before the guard knows of it: booting needs no grant, and its warm-up disturbs the
        served engine no more than the loading of its weights."""
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


def _device() -> str:
    """NVML's id of the first GPU that this process may use; empty if there is none."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip()
    if first.startswith(("GPU-", "MIG-")):
        return first
    from vllm.platforms import current_platform

    return str(current_platform.get_device_uuid(0)) if current_platform.is_cuda() else ""
