"""Loads weights from files into a vLLM model, inside each engine process: in place, or all of them, layer by layer.

Invariant: files are open only from `open_files` to `finish_weight_update` or `close_files`: their owner may change them
afterwards. Nothing is written before the update itself, so earlier refusals leave the weights whole. A failure during
the update leaves a mixture, from which the worker must not serve again.

vLLM's layerwise reload does most of a reload, but does not know what CPU builds keep beside the parameters:

- An output layer that is tied to the embedding has no tensor of its own in a checkpoint, so the reload skips it and its
  packed copy would stay that of the old weights. It uses the embedding's packed copy, which the reload does renew.
- Expert layers are packed only when their kernel is first set up; a reload would copy unpacked weights over packed
  ones. Their kernels are set up again.
- Input embeddings are packed in vain where a separate output layer exists.

vLLM's sleep mode only warns on CPU builds. `drop_weights` drops the parameters' pages (MADV_DONTNEED) and frees the
packed copies; a reload makes all of it again. Nothing may be computed in between.
"""

import ctypes
import logging
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import safe_open
from vllm.config import set_current_vllm_config
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from ebbtide.errors import InvalidRequest
from ebbtide.rollout_worker.engine import Boxes
from ebbtide.rollout_worker.engine.vllm import cpu_build
from ebbtide.rollout_worker.engine.vllm.in_place_update import aliases, observe, obstacle, write_in_place
from ebbtide.rollout_worker.engine.vllm.kv_cache import drop_pages

log = logging.getLogger(__name__)
# vLLM warns of each layer without tensors of its own in a checkpoint; `check_weights` finds missing ones beforehand.
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
        self._tied = tied_layers(self.model)
        self._aliases = {
            name: first for name, first in aliases(self.model).items() if {name, first} <= self._entries.keys()
        }
        if cpu_build.is_cpu_build():
            cpu_build.keep_freed_memory()
            free_duplicates(self.model, self._tied)
        try:
            with set_current_vllm_config(self.vllm_config):
                seen = observe(self.model, self._entries)
        except InvalidRequest as error:
            log.warning("all of each version is needed here: %s", error)
            self._obstacle = str(error)
        else:
            self._boxes = seen.boxes
            quantised = self.vllm_config.quant_config is not None
            self._obstacle = obstacle(self.model, quantised, seen, root)

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
            refusal = write_in_place(self.model, self._changes, self._entries, frozenset(self._aliases))
            if not refusal:
                return
            log.warning("not changed in place: %s", refusal)
        tensors = ((name, self._tensor(name)) for name in self._entries)
        reload_layers(self.model, self.model_config, tensors, self._tied)

    def finish_weight_update(self) -> None:
        self.close_files()

    def drop(self) -> None:
        """Give the memory of all weights back to the system. Only an update without `in_place` restores them."""
        drop_weights(self.model)

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


Tied = list[tuple[VocabParallelEmbedding, VocabParallelEmbedding]]


def tied_layers(model: torch.nn.Module) -> Tied:
    """Output layers with the embedding whose weight they share.

    Raises `ValueError` for one with further parameters: a reload would believe that it was loaded, and copy unfilled
    memory over the shared weight.
    """
    found: Tied = []
    owners: dict[int, VocabParallelEmbedding] = {}
    for name, layer in model.named_modules():
        if not isinstance(layer, VocabParallelEmbedding) or "weight" not in dict(layer.named_parameters()):
            continue
        owner = owners.setdefault(id(layer.weight), layer)
        if owner is not layer:
            if more := [one for one, _ in layer.named_parameters() if one != "weight"]:
                raise ValueError(f"{name} ties its weight but has {more[0]} of its own, which no reload supports")
            found.append((layer, owner))
    return found


def free_duplicates(model: torch.nn.Module, tied: Tied) -> None:
    """Free duplicate and useless packed weights, on a CPU build, once after boot."""
    heads = [layer for layer in model.modules() if isinstance(layer, ParallelLMHead)]
    for layer in model.modules():
        used = isinstance(layer, ParallelLMHead) or layer in [owner for _, owner in tied] or not heads
        if isinstance(layer, VocabParallelEmbedding) and not used and hasattr(layer, "cpu_linear"):
            layer.cpu_linear = torch.nn.functional.linear
            layer.quant_method.process_weights_after_loading = _nothing
    _share_packed(tied)


def reload_layers(model: Any, model_config: Any, tensors: Iterable[tuple[str, torch.Tensor]], tied: Tied) -> None:
    """Replace all weights. A failure in here leaves a mixture."""
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        if isinstance(method, UnquantizedFusedMoEMethod) and _on_cpu(layer):
            method.moe_kernel = None
    initialize_layerwise_reload(model)
    model.load_weights(tensors)
    finalize_layerwise_reload(model, model_config)
    _share_packed(tied)


def drop_weights(model: torch.nn.Module) -> None:
    """Give the memory of all weights of `model` back to the system. They read as zeros, or fail, until a reload."""
    for layer in model.modules():
        if hasattr(layer, "cpu_linear"):
            layer.__dict__["cpu_linear"] = _absent  # a plain attribute, whatever its type was
    for tensor in model.parameters():
        if tensor.device.type == "cpu" and tensor.is_contiguous():
            drop_pages(tensor.data_ptr(), tensor.nbytes)
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):  # the C library would keep the freed packed copies for the next reload
        libc.malloc_trim(0)


def _absent(*_: object) -> torch.Tensor:
    raise RuntimeError("the weights are away")


def _share_packed(tied: Tied) -> None:
    for head, owner in tied:
        if hasattr(owner, "cpu_linear"):
            head.cpu_linear = owner.cpu_linear


def _on_cpu(layer: torch.nn.Module) -> bool:
    return all(parameter.device.type == "cpu" for parameter in layer.parameters(recurse=False))


def _nothing(layer: torch.nn.Module) -> None:
    """Replaces the packing of `layer`."""
