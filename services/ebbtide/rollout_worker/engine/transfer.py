"""Weights into a vLLM model from a safetensors file, inside each engine process.

Invariant: an update is checked by every engine process before any applies it: what is refused then has touched
nothing. What fails while it is applied leaves a mixture, from which the worker must not serve again. Nothing is
kept here between two updates.
"""

import logging
from dataclasses import dataclass, field
from typing import Any

from safetensors import safe_open
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from ebbtide.rollout_worker.engine.checkpoint import misfits

# It warns of each layer that has no tensors of its own in a checkpoint; that none is missing is checked here.
logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)


@dataclass
class InitInfo(WeightTransferInitInfo):  # type: ignore[misc]  # mypy does not follow vLLM
    """`shapes`: the tensors that a version must have."""

    shapes: dict[str, list[int]] = field(default_factory=dict)


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """`path`: a safetensors file that the worker wrote from verified tiles, only checked unless `apply`."""

    path: str = ""
    apply: bool = False


class TileTransfer(WeightTransferEngine[InitInfo, UpdateInfo]):  # type: ignore[misc]
    """Reloads all layers from one file between pause and resume."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    _shapes: dict[str, list[int]] = {}  # noqa: RUF012 - replaced, never changed

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        self._shapes = init_info.shapes

    def start_weight_update(self) -> None:
        """Nothing yet: the file is checked first."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        # The base class ends with an accelerator's synchronise, which CPU builds do not have; loading here is
        # synchronous, and on an accelerator the copies are ordered before the next step on the same stream.
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: UpdateInfo) -> None:
        with safe_open(update_info.path, framework="pt") as file:
            if not update_info.apply:
                self._check({name: list(file.get_slice(name).get_shape()) for name in file.keys()})  # noqa: SIM118
                return
            initialize_layerwise_reload(self.model)
            self.model.load_weights((name, file.get_tensor(name)) for name in self._shapes)
            finalize_layerwise_reload(self.model, self.model_config)

    def finish_weight_update(self) -> None:
        """Nothing left: one file is one update."""

    def shutdown(self) -> None:
        """Nothing is held."""

    def _check(self, found: dict[str, list[int]]) -> None:
        if names := misfits(found, self._shapes):
            raise ValueError(f"the weights are of another architecture: see {names}")
