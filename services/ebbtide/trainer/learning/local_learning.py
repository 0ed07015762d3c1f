"""Computes a training in this process: network, tokenizer and learner on their device.

It knows no service; `ebbtide.trainer.training` talks to services and knows no tensor. Each of several ranks has one,
with its share of the network; rank 0's is a `ebbtide.trainer.ranks.rank_group.RankZeroLearning`.
"""

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from random import Random
from typing import Any

import torch

from ebbtide.claimed_runs.run_loop import RunFailed
from ebbtide.client.publisher.rank_exchange import RankExchange
from ebbtide.errors import InvalidRequest
from ebbtide.trainer import training_checkpoint
from ebbtide.trainer.learning import gpu_changes
from ebbtide.trainer.learning.experience import samples_of, summary
from ebbtide.trainer.learning.grpo import StepStats
from ebbtide.trainer.learning.learner import Learner, LearnerSettings
from ebbtide.trainer.learning.network import Network, load_network, load_tokenizer
from ebbtide.trainer.learning.trainer_memory import CudaRoom, TrainerMemory
from ebbtide.trainer.learning.training_batches import TrainingSample
from ebbtide.trainer.ranks.network_sharding import local, own_tensors
from ebbtide.trainer.ranks.rank_world import RankWorld
from ebbtide.trainer.ranks.sharded_loading import load_sharded
from ebbtide.trainer.training_checkpoint import CheckpointError, TrainingState
from ebbtide.types.rollout import Trajectory
from ebbtide.types.run import RunSpec, check_learnable
from ebbtide.weights import end_tokens


class LocalLearning:
    """Keeps weights and optimiser in float32, as bfloat16 would lose small updates.

    With `trainer.dtype` bfloat16, only computation and published weights are bfloat16.
    """

    def __init__(
        self, spec: RunSpec, *, source: Path, device: str, keep_published: bool = True, world: RankWorld | None = None
    ) -> None:
        """Loads the weights in `source`: the run's model, or a checkpoint of it. Raises `InvalidRequest`.

        `keep_published`: keep the published weights on the GPU, if it has room after a step. `world`: the ranks that
        share the network.
        """
        check_learnable(spec.sampling, field="sampling")
        self._spec = spec
        self._device = device
        self._world = world
        self._network = self._place(source)
        self._tokenizer = load_tokenizer(source)
        reference = None
        if spec.trainer.kl_coefficient:
            reference = self._place(Path(spec.model)).requires_grad_(False)
        settings = _settings(spec, end_tokens(source))
        self._learner = Learner(self._network, settings, version=0, reference=reference, ranks=world)
        self._memory = TrainerMemory(self._learner.movable, CudaRoom(device)) if self.on_gpu else None
        self._keeps: bool | None = None if keep_published else False  # None: unknown
        self._added = 0  # samples of the step's groups so far

    @property
    def on_gpu(self) -> bool:
        return self._device.startswith("cuda")

    def give_up_memory(self, needed: int) -> int:
        """Makes room on the GPU, until `restore_memory`, for an engine that needs so many bytes. No step trains
        meanwhile. Returns how many the engine lacks all the same."""
        if self._memory is None:
            return 0
        self._memory.give_up(needed)
        return self._memory.lacking(needed)

    def restore_memory(self) -> None:
        """Brings back what `give_up_memory` moved."""
        if self._memory is not None:
            self._memory.restore()

    def _place(self, source: Path) -> Network:
        if self._world is None:
            return load_network(source).to(self._device)
        return load_sharded(source, self._world.mesh, dtype=self._spec.trainer.dtype, device=self._device)

    def resume(self, path: Path, *, run_id: str) -> TrainingState:
        """Loads optimiser and scheduler of a checkpoint, whose weights are loaded. Raises `CheckpointError`."""
        state, learner = training_checkpoint.read_state(
            path, run_id=run_id, parameters=list(self._network.parameters())
        )
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

    def train(self, samples: Sequence[TrainingSample], *, step: int, version: int) -> StepStats:
        """Updates on the samples of `step`, with the weights of `version`."""
        self._learner.version = version
        with self._precision():
            stats = self._learner.step(samples, Random(f"{self._spec.seed}/{step}"))
        self._find_room()
        return stats

    def accumulate(self, samples: Sequence[TrainingSample], *, version: int) -> None:
        """Adds the gradient of the samples, with the weights of `version`."""
        self._learner.version = version
        with self._precision():
            self._learner.accumulate(samples)

    def update(self) -> StepStats:
        """Updates on the samples that were accumulated."""
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
            own = ((name, local(tensor)) for name, tensor in self._tensors())
            self._keeps = gpu_changes.has_room(own, self._device)

    def exchange(self) -> RankExchange | None:
        """Begins a version on all ranks. Returns the exchange of the ranks that publish together; None for one rank."""
        return None

    def tensors(self) -> Iterable[tuple[str, torch.Tensor]]:
        """Returns the weights to publish, named as in checkpoints, tied ones once. Read them before the next step."""
        return gpu_changes.KeptTensors(self._tensors, self._network.device.type) if self._keeps else self._tensors()

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in own_tensors(self._network):
            low = self._spec.trainer.dtype == "bfloat16" and tensor.is_floating_point()
            yield name, tensor.to(torch.bfloat16) if low else tensor

    def checkpoint(self, folder: Path, state: TrainingState, *, keep: int) -> Path:
        """Writes a durable checkpoint into `folder`, where the `keep` newest stay. Returns its directory."""
        with self._memory.still if self._memory is not None else contextlib.nullcontext():
            path = training_checkpoint.write(folder, self._network, self._tokenizer, self._learner.state_dict(), state)
        training_checkpoint.keep_newest(folder, keep)
        return path

    def write_part(self, unfinished: Path) -> Any:
        """Writes this rank's part of a checkpoint (`ebbtide.trainer.training_checkpoint.write_part`)."""
        if self._world is None:
            raise CheckpointError("one rank writes its checkpoints whole")
        return training_checkpoint.write_part(unfinished, self._network, self._learner.state_dict(), self._world)

    def _precision(self) -> contextlib.AbstractContextManager[object]:
        if self._spec.trainer.dtype == "bfloat16":
            return torch.autocast(self._device.partition(":")[0], torch.bfloat16)
        return contextlib.nullcontext()


def choose_device(wish: str) -> str:
    """Returns the device for a setting. Raises `InvalidRequest` if it does not exist."""
    if wish == "cuda" and not torch.cuda.is_available():
        raise InvalidRequest("torch sees no CUDA device here; take cpu or auto", field="device")
    return ("cuda" if torch.cuda.is_available() else "cpu") if wish == "auto" else wish


def device_name(device: str) -> str:
    """The name of a GPU; empty for a CPU."""
    return torch.cuda.get_device_name() if device.startswith("cuda") else ""


def _settings(spec: RunSpec, ends: Sequence[int]) -> LearnerSettings:
    """The learner's settings; `ends`: the end-of-sequence tokens of the model."""
    given = {name: getattr(spec.trainer, name) for name in spec.trainer.__struct_fields__}
    given |= {"sampling": spec.sampling, "eos_ids": tuple(ends)}
    known = {field.name for field in fields(LearnerSettings)}
    return LearnerSettings(**{name: value for name, value in given.items() if name in known})
