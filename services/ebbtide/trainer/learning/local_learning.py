"""Computes a training in this process: network, tokenizer and learner on their device.

It knows no service; `ebbtide.trainer.training` talks to services and knows no tensor. Each of several ranks has one,
with its share of the network; rank 0's is a `ebbtide.trainer.ranks.rank_group.RankZeroLearning`.
"""

import contextlib
import gc
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields, replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import torch

from ebbtide.client.publisher.rank_exchange import RankExchange
from ebbtide.errors import InvalidRequest
from ebbtide.gpu_memory import container_memory, host_memory
from ebbtide.hub_models import model_folder
from ebbtide.run_client import RunFailed
from ebbtide.telemetry import get_logger
from ebbtide.trainer import training_checkpoint
from ebbtide.trainer.learning import gpu_changes
from ebbtide.trainer.learning.checkpoint_tensors import checkpoint_tensors, published
from ebbtide.trainer.learning.grpo import StepStats
from ebbtide.trainer.learning.learner import Learner, LearnerSettings
from ebbtide.trainer.learning.network import Network, checkpoint_layers, load_network, load_tokenizer
from ebbtide.trainer.learning.out_of_memory import MemoryKnobs, OutOfMemory, naming_knobs
from ebbtide.trainer.learning.packed_attention import has_kernel
from ebbtide.trainer.learning.parked_state import Parked, StatePark
from ebbtide.trainer.learning.trainer_memory import CpuRoom, CudaRoom, TrainerMemory
from ebbtide.trainer.learning.training_batches import TrainingSample, samples_of, summary
from ebbtide.trainer.ranks.rank_world import RankWorld, agreeing
from ebbtide.trainer.ranks.sharding import load_sharded, local
from ebbtide.trainer.training_checkpoint import CheckpointError, CheckpointPart, Store, TrainingState
from ebbtide.types.rollout import Trajectory
from ebbtide.types.run import RunSpec, check_learnable
from ebbtide.weights import end_tokens
from ebbtide.weights.tensors import Part

log = get_logger(__name__)


class LocalLearning:
    """Keeps weights and optimiser in float32, as bfloat16 would lose small updates.

    Only computation and published weights are bfloat16, if `trainer.dtype` says so or leaves the choice to the device.
    """

    def __init__(
        self,
        spec: RunSpec,
        *,
        source: Path,
        device: str,
        keep_published: bool = True,
        offload: bool = False,
        world: RankWorld | None = None,
        park: StatePark | None = None,
    ) -> None:
        """Loads the weights in `source`: the run's model, or a checkpoint of it. Raises `InvalidRequest`.

        `keep_published`: keep the published weights on the GPU, if it has room after a step. `offload`: keep the
        optimiser's moments in host memory. `world`: the ranks that share the network. `park`: where the state is kept
        between turns on the device; then no published weights stay there.
        """
        check_learnable(spec.sampling, field="sampling")
        gc.collect()  # a former run's network is in a reference cycle, and an error may hold what a step computed
        self._spec = spec
        self._device = device
        self._dtype = compute_dtype(spec.trainer.dtype, device)
        self._world = world
        self._offload, self._checkpointed = offload, True
        #: Why weights could not be read for a version: where several ranks publish, the error itself goes to rank 0.
        self.ran_out: OutOfMemory | None = None
        with agreeing(world.add_up if world is not None else list):
            settings, reference = self._load(source)
        with self._fitting("the first passes of the model"):
            self._learner = Learner(self._network, settings, version=0, reference=reference, ranks=world)
        if spec.trainer.packing and not self.packed:
            raise InvalidRequest("this network's samples cannot be packed; leave it out", field="trainer.packing")
        self._memory: TrainerMemory | None = None
        if self.on_gpu or park is not None:
            room = CudaRoom(device) if self.on_gpu else CpuRoom()
            self._memory = TrainerMemory(self._learner.movable, room, whole=self._learner.everything, park=park)
        self._keeps: bool | None = None if keep_published and park is None else False  # None: unknown
        self._added = 0  # samples of the step's groups so far

    def _load(self, source: Path) -> tuple[LearnerSettings, Network | None]:
        """Loads what this rank needs by itself. Returns the learner's settings, and the reference network if any."""
        spec = self._spec
        with self._fitting("loading the model"):
            self._network = self._place(source)
        self._checkpointed = self._checkpoint_layers()
        self._named = checkpoint_tensors(self._network)
        self._tokenizer = load_tokenizer(source)
        reference = None
        if spec.trainer.kl_coefficient:
            with self._fitting("loading the model a second time, for trainer.kl_coefficient,"):
                reference = self._place(model_folder(spec.model)).requires_grad_(False)
        settings = _settings(spec, end_tokens(source), offload=self._offload)
        return replace(settings, dtype=self._dtype, packing=self._wants_packing()), reference

    @property
    def on_gpu(self) -> bool:
        return self._device.startswith("cuda")

    @property
    def packed(self) -> bool:
        """Whether micro-batches are packed rows without padding."""
        return self._learner.packed

    def _wants_packing(self) -> bool:
        wish = self._spec.trainer.packing
        return has_kernel(self._device) and self._dtype == "bfloat16" if wish is None else wish

    def _checkpoint_layers(self) -> bool:
        """Has layers computed again in the backward pass, if that is wanted. Returns whether they are."""
        wish = self._spec.trainer.gradient_checkpointing
        if not (self.on_gpu if wish is None else wish):
            return False
        if checkpoint_layers(self._network):
            return True
        if wish:
            text = "this network's layers cannot be computed again; leave it out"
            raise InvalidRequest(text, field="trainer.gradient_checkpointing")
        log.warning("activations are kept: this network's layers cannot be computed again")
        return False

    def give_up_memory(self, needed: int) -> int:
        """Makes room on the GPU, until `restore_memory`, for an engine that needs so many bytes. No step trains
        meanwhile. Returns how many the engine lacks all the same."""
        if self._memory is None:
            return 0
        self._memory.give_up(needed)
        return self._memory.lacking(needed)

    def leave_device(self) -> Parked:
        """Moves the whole state off the device, until `restore_memory`. Nothing reads it meanwhile. Raises `RunFailed`
        if it has no room elsewhere."""
        return self._memory.leave() if self._memory is not None else Parked(0, warm=True)

    def restore_memory(self) -> None:
        """Brings back what `give_up_memory` or `leave_device` moved. Raises `StateDamaged` if it came back with other
        bytes."""
        if self._memory is not None:
            with self._fitting("what comes back after others had the device"):
                self._memory.restore()

    def forget_parked(self) -> None:
        """Frees host memory of a state that left its device and will not come back."""
        if self._memory is not None:
            self._memory.forget()

    def _place(self, source: Path) -> Network:
        if self._world is None:
            return load_network(source).to(self._device)
        return load_sharded(source, self._world.mesh, dtype=self._dtype, device=self._device)

    def resume(self, path: Path, *, run_id: str) -> TrainingState:
        """Loads optimiser and scheduler of a checkpoint, whose weights are loaded. Raises `CheckpointError`."""
        parameters, in_host = list(self._network.parameters()), self._learner.settings.offload
        with self._fitting("loading the optimiser's state"):
            state, learner = training_checkpoint.read_state(path, run_id=run_id, parameters=parameters, in_host=in_host)
            self._learner.load_state_dict(learner)
        return state

    def step(
        self, trajectories: Sequence[Trajectory], *, step: int, steps: Mapping[int, int], version: int
    ) -> dict[str, float]:
        """Trains on the trajectories of `step`, with the weights of `version`; `steps`: version -> its step.

        Returns the values to report. Skips the update if no sample teaches. Raises `RunFailed` unless all are finite.
        """
        samples = self._samples(trajectories, step)
        stats = self.train(samples, step=step, version=version) if samples else None
        return self._values(trajectories, len(samples), stats, step=step, steps=steps)

    def add_groups(self, trajectories: Sequence[Trajectory], *, step: int, version: int) -> None:
        """Adds the gradient of some whole groups of `step`, with the weights of `version`, in any order of groups."""
        samples = self._samples(trajectories, step)
        if samples:
            self.accumulate(samples, version=version)
        self._added += len(samples)

    def finish_step(
        self, trajectories: Sequence[Trajectory], *, step: int, steps: Mapping[int, int]
    ) -> dict[str, float]:
        """Ends a `step` whose trajectories were all given to `add_groups`. Returns and raises as `step` does."""
        added, self._added = self._added, 0
        stats = self.update() if added else None
        return self._values(trajectories, added, stats, step=step, steps=steps)

    def text(self, ids: Sequence[int]) -> str:
        """Returns tokens as text, special ones included."""
        return str(self._tokenizer.decode(list(ids), clean_up_tokenization_spaces=False))

    def train(self, samples: Sequence[TrainingSample], *, step: int, version: int) -> StepStats:
        """Updates on the samples of `step`, with the weights of `version`."""
        self._learner.version = version
        with self._fitting(f"step {step + 1}", samples):
            stats = self._learner.step(samples, Random(f"{self._spec.seed}/{step}"))
        self._find_room()
        return stats

    def accumulate(self, samples: Sequence[TrainingSample], *, version: int) -> None:
        """Adds the gradient of the samples, with the weights of `version`."""
        self._learner.version = version
        with self._fitting("the gradient of a step's groups", samples):
            self._learner.accumulate(samples)

    def update(self) -> StepStats:
        """Updates on the samples that were accumulated."""
        with self._fitting("the update of a step"):
            stats = self._learner.update()
        self._find_room()
        return stats

    def _samples(self, trajectories: Sequence[Trajectory], step: int) -> list[TrainingSample]:
        return samples_of(trajectories, self._spec.trainer, seed=self._spec.seed, step=step)

    def _values(
        self,
        trajectories: Sequence[Trajectory],
        taught: int,
        stats: StepStats | None,
        *,
        step: int,
        steps: Mapping[int, int],
    ) -> dict[str, float]:
        """Returns the values to report of a step whose samples `taught`. Raises `RunFailed` unless all are finite."""
        values = summary(trajectories, steps, step=step)
        values["taught"] = float(taught)
        if stats is not None:
            values |= {name: float(value) for name, value in asdict(stats).items() if value is not None}
            values["tokens"] = float(sum(trajectory.loss_mask.count(1) for trajectory in trajectories))
        if not self._spec.trainer.kl_coefficient:
            values.pop("kl", None)  # nothing was measured
        if bad := [name for name, value in values.items() if not math.isfinite(value)]:
            raise RunFailed(f"step {step}: {', '.join(bad)} not finite; lower trainer.learning_rate")
        return values

    def _find_room(self) -> None:
        """Decides after the first step whether published weights are kept on the GPU."""
        if self._keeps is None:
            own = ((name, one.local if isinstance(one, Part) else local(one)) for name, one in self._tensors())
            self._keeps = gpu_changes.has_room(own, self._device)

    def exchange(self) -> RankExchange | None:
        """Begins a version on all ranks. Returns the exchange of the ranks that publish together; None for one rank."""
        return None

    def tensors(self) -> Iterable[tuple[str, Any]]:
        """Returns the weights to publish, named as in checkpoints, tied ones once. Read them before the next step."""
        return gpu_changes.KeptTensors(self._tensors, self._network.device.type) if self._keeps else self._tensors()

    def _tensors(self) -> Iterator[tuple[str, Any]]:
        if self._world is not None:
            self._world.settle()  # the thread that publishes locks pages, in the context of the device that it selected
        dtype = torch.bfloat16 if self._dtype == "bfloat16" else None
        try:
            with self._fitting("reading the weights of a version"):
                yield from published(self._network, self._named, dtype)
        except OutOfMemory as error:
            self.ran_out = error
            raise

    def checkpoint(self, folder: Path, state: TrainingState, *, keep: int) -> Path:
        """Writes a durable checkpoint into `folder`, where the `keep` newest stay. Returns its directory."""
        return self.begin_checkpoint(folder, state, keep=keep)()

    def begin_checkpoint(self, folder: Path, state: TrainingState, *, keep: int) -> Store:
        """Copies what a checkpoint holds to host memory, so that training may go on. Returns what writes it, as
        `checkpoint` does. Without the memory for it, all is written before this returns."""
        with self._still(), self._fitting("a checkpoint"):
            if not self._has_room_aside():
                path = training_checkpoint.write(
                    folder, self._network, self._tokenizer, self._learner.state_dict(), state
                )
                return partial(_kept, lambda: path, folder, keep)
            store = training_checkpoint.copied(
                folder, self._network, self._tokenizer, self._learner.state_dict(), state
            )
        return partial(_kept, store, folder, keep)

    def begin_part(self, unfinished: Path) -> CheckpointPart:
        """Begins this rank's part of a checkpoint, together with all ranks. Its `store` may run beside training."""
        if self._world is None:
            raise CheckpointError("one rank writes its checkpoints whole")
        with self._still(), self._fitting("a checkpoint"):
            return CheckpointPart(
                unfinished, self._network, self._learner.state_dict(), self._world, aside=self._has_room_aside()
            )

    def _still(self) -> contextlib.AbstractContextManager[object]:
        return self._memory.still if self._memory is not None else contextlib.nullcontext()

    def _has_room_aside(self) -> bool:
        """Whether the host has room for a copy of weights and moments of all its ranks, and as much again is left."""
        ranks = 1 if self._world is None else int(os.environ.get("LOCAL_WORLD_SIZE", self._world.size))
        needed = ranks * sum(12 * local(parameter).numel() for parameter in self._network.parameters())
        return 2 * needed <= min(host_memory()[0], container_memory())

    def _fitting(self, what: str, samples: Sequence[TrainingSample] = ()) -> contextlib.AbstractContextManager[None]:
        """Raises `OutOfMemory` with the remedies if `what`, on these samples, does not fit into the device."""
        return naming_knobs(self._rank_name() + what, self._device, lambda: self._knobs(samples))

    def _rank_name(self) -> str:
        return "" if self._world is None else f"rank {self._world.rank}: "

    def _knobs(self, samples: Sequence[TrainingSample]) -> MemoryKnobs:
        network = getattr(self, "_network", None)
        shares = [] if network is None or self._offload else [local(one).numel() for one in network.parameters()]
        return MemoryKnobs(
            micro_batch_tokens=self._spec.trainer.micro_batch_tokens,
            longest=max((sample.length for sample in samples), default=0),
            moments=8 * sum(shares),
            float32=self.on_gpu and self._dtype == "float32",
            plain=not self._checkpointed,
            ranks=self._world.size if self._world is not None else 1,
        )


def _kept(store: Store, folder: Path, keep: int) -> Path:
    """Stores a checkpoint, and removes all but the newest."""
    path = store()
    training_checkpoint.keep_newest(folder, keep)
    return path


def choose_device(wish: str) -> str:
    """Returns the device for a setting. Raises `InvalidRequest` if it does not exist."""
    if wish == "cuda" and not torch.cuda.is_available():
        raise InvalidRequest("torch sees no CUDA device here; take cpu or auto", field="device")
    return ("cuda" if torch.cuda.is_available() else "cpu") if wish == "auto" else wish


def compute_dtype(wish: str, device: str) -> str:
    """Returns the dtype of computation and published weights for `trainer.dtype`: bfloat16 or float32.

    `auto` is bfloat16 on GPUs with units for it. In float32 there is neither FlashAttention nor a tensor core for
    matrix products, and most elements of a version differ from the one before.
    """
    if wish != "auto":
        return wish
    low = device.startswith("cuda") and torch.cuda.is_bf16_supported(including_emulation=False)
    return "bfloat16" if low else "float32"


def device_name(device: str) -> str:
    """The name of a GPU; empty for a CPU."""
    return torch.cuda.get_device_name() if device.startswith("cuda") else ""


def _settings(spec: RunSpec, ends: Sequence[int], *, offload: bool) -> LearnerSettings:
    """The learner's settings; `ends`: the end-of-sequence tokens of the model."""
    given = {name: getattr(spec.trainer, name) for name in spec.trainer.__struct_fields__}
    given |= {"sampling": spec.sampling, "eos_ids": tuple(ends), "offload": offload}
    known = {field.name for field in fields(LearnerSettings)}
    return LearnerSettings(**{name: value for name, value in given.items() if name in known})
