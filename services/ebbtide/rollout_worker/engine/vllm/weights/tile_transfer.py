"""Loads weights from files into a vLLM model, inside each engine process.

Invariant: files are open only from `open_files` to `finish_weight_update` or `close_files`: their owner may change them
afterwards. Nothing is written before the update itself, so earlier refusals leave the weights whole. A failure during
the update leaves a mixture, from which the worker must not serve again.
"""

import logging
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import safe_open
from vllm.config import set_current_vllm_config
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo

from ebbtide.errors import InvalidRequest
from ebbtide.rollout_worker.engine.vllm import cpu_build
from ebbtide.rollout_worker.engine.vllm.weights import in_place_update, layerwise_reload
from ebbtide.rollout_worker.engine.vllm.weights.loader_map import aliases, observe
from ebbtide.rollout_worker.engine.vllm.weights.tensor_boxes import Boxes

log = logging.getLogger(__name__)
# vLLM warns of each layer without tensors of its own in a checkpoint; `version_files` finds missing ones beforehand.
logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)

#: Bytes that are mapped at once between two steps of generation: a few milliseconds.
_TOUCHED: Final = 32 << 20
_PAGE: Final = 4096


@dataclass
class InitInfo(WeightTransferInitInfo):  # type: ignore[misc]  # mypy does not follow vLLM
    """Empty: the checkpoint holds all facts."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """How the open files get into the model."""

    in_place: bool = False


class WorkerExtension:
    """Mixed into vLLM's worker: calls steps of the transfer by name, for which vLLM has no call."""

    def ebbtide(self, step: str, **arguments: Any) -> Any:
        return getattr(self.weight_transfer_engine, step)(**arguments)  # type: ignore[attr-defined]

    def ebbtide_drafts(self, step: str) -> Any:
        """A step of the proposer of drafts. It looks up this process's requests, so it is told who runs them."""
        runner = self.model_runner  # type: ignore[attr-defined]
        drafter = getattr(runner, "drafter", None)
        return getattr(drafter, step)(runner=runner) if drafter is not None else None


class TileTransfer(WeightTransferEngine[InitInfo, UpdateInfo]):  # type: ignore[misc]
    """Replaces all weights, or changes them in place, between pause and resume."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._open = ExitStack()
        self._weights: Any = None
        self._changes: Path | None = None
        self._touching: Iterator[None] = iter(())
        self._boxes: Boxes | None = None
        self._obstacle = ""

    def init_transfer_engine(self, init_info: InitInfo) -> None:  # noqa: ARG002 - vLLM's signature
        """Learn how the model's loader treats the checkpoint that was just loaded."""
        root = Path(self.model_config.model)
        self._entries = entries(root)
        self._tied = layerwise_reload.tied_layers(self.model)
        self._aliases = {
            name: first for name, first in aliases(self.model).items() if {name, first} <= self._entries.keys()
        }
        if cpu_build.is_cpu_build():
            cpu_build.keep_freed_memory()
            layerwise_reload.prepare(self.model, self._tied)
        try:
            with set_current_vllm_config(self.vllm_config):
                seen = observe(self.model, self._entries)
        except InvalidRequest as error:
            log.warning("all of each version is needed here: %s", error)
            self._obstacle = str(error)
        else:
            self._boxes = seen.boxes
            quantised = self.vllm_config.quant_config is not None
            self._obstacle = in_place_update.obstacle(self.model, quantised, seen, root)

    def report(self) -> tuple[Boxes | None, str]:
        """The slices that this process reads, None for everything; and the obstacle to changes in place."""
        return self._boxes, self._obstacle

    def open_files(self, weights: str, changes: str | None) -> None:
        """Map the files. Raises if that fails, or if tied weights differ."""
        self.close_files()
        self._weights = self._open.enter_context(safe_open(weights, framework="pt"))
        self._changes = Path(changes) if changes else None
        for name, first in self._aliases.items():
            if not torch.equal(self._tensor(name), self._tensor(first)):
                raise ValueError(f"{name} differs from {first}, to which this model ties it")
        self._touching = iter(()) if changes else self._touch()

    def touch(self) -> bool:
        """Map some more of the data, so that the update does not wait for it. Returns whether there is more."""
        return next(self._touching, self) is not self

    def _touch(self) -> Iterator[None]:
        size = 0
        for name in self._entries:
            for box in [()] if self._boxes is None else self._boxes[name]:
                part = self._tensor(name)[tuple(slice(*pair) for pair in box)]
                if part.is_contiguous() and part.numel():
                    part.flatten().view(torch.uint8)[::_PAGE].max()
                size += part.nbytes
                if size >= _TOUCHED:
                    size = 0
                    yield

    def close_files(self) -> None:
        """Close the files."""
        self._touching, self._weights, self._changes = iter(()), None, None
        self._open.close()

    def start_weight_update(self) -> None:
        """Does nothing: the files are already open."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        # Skips the base class's final synchronise, which CPU builds lack: loading is synchronous there, and an
        # accelerator orders the copies before the next step on the same stream.
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: UpdateInfo) -> None:
        if update_info.in_place and self._changes is not None:
            refusal = in_place_update.apply(self.model, self._changes, self._entries, frozenset(self._aliases))
            if not refusal:
                return
            log.warning("not changed in place: %s", refusal)
        tensors = ((name, self._tensor(name)) for name in self._entries)
        layerwise_reload.reload(self.model, self.model_config, tensors, self._tied)

    def finish_weight_update(self) -> None:
        self.close_files()

    def drop(self) -> None:
        """Give the memory of all weights back to the system. Only an update without `in_place` restores them."""
        layerwise_reload.drop(self.model)

    def pool_bytes(self) -> int:
        """Bytes of this process's device that vLLM's sleep mode gives back; 0 without that mode."""
        if not self.vllm_config.model_config.enable_sleep_mode:
            return 0
        from vllm.device_allocator import get_mem_allocator_instance

        return int(get_mem_allocator_instance().get_current_usage())

    def shutdown(self) -> None:
        self.close_files()

    def _tensor(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._weights.get_tensor(name)
        return tensor


def entries(root: Path) -> dict[str, tuple[torch.dtype, torch.Size]]:
    """Type and shape of each tensor of the checkpoint directory `root`."""
    found: dict[str, tuple[torch.dtype, torch.Size]] = {}
    for path in sorted(root.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - it is no mapping
                tensor = file.get_tensor(name)
                found[name] = (tensor.dtype, tensor.shape)
    return found
