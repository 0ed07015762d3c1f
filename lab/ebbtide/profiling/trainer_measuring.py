"""Measures a trainer on made-up samples: steps of many sizes, copies and encodings of its weights, checkpoints.

It loads and trains the network as a run's trainer does, in this process. Rounds of all steps follow each other in
changing order, so that what else the machine does falls on all of them alike.
"""

import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Final, NamedTuple

from msgspec.structs import replace

from ebbtide.profiling.measured_learning import LearnerWork, TrainerMeasurements
from ebbtide.trainer.learning.sample_deal import micro_parts, minibatches
from ebbtide.types.run import RunSpec

if TYPE_CHECKING:
    from ebbtide.trainer.learning.local_learning import LocalLearning
    from ebbtide.trainer.learning.training_batches import TrainingSample

#: Parts of a run's step that are measured: its samples, and the longest of its responses.
_SAMPLES: Final = (0.0625, 0.25, 1.0)
_LENGTHS: Final = (0.25, 0.5, 1.0)
#: Token ids of made-up samples; which ones they are does not change the time.
_IDS: Final = 32
_VERSION: Final = 1


class MeasuredStep(NamedTuple):
    """`samples` with responses of up to `response` tokens; `stale`: older weights made them, which costs a forward."""

    samples: int
    response: int
    stale: bool


def plan_steps(spec: RunSpec) -> list[MeasuredStep]:
    """Steps up to the run's own size, the small ones first."""
    most = spec.batch.groups_per_step * spec.batch.group_size
    steps = dict.fromkeys(
        MeasuredStep(max(spec.trainer.minibatches, round(most * samples)), max(1, round(longest * length)), stale)
        for longest in [spec.sampling.max_tokens]
        for stale in (False, True)
        for samples in _SAMPLES
        for length in _LENGTHS
        if not stale or length == max(_LENGTHS)
    )
    return sorted(steps, key=lambda step: (step.samples * step.response, step.stale))


def measure_trainer(
    spec: RunSpec,
    *,
    device: str,
    threads: int,
    prompt_tokens: int,
    seconds: float,
    folder: Path,
    tell: Callable[[str], None],
) -> TrainerMeasurements:
    """Measures one rank for so many seconds, its start not counted; a step that has begun is ended.

    `device`, `threads`: see `TrainerSettings`; `folder`: for a checkpoint, which is removed.
    Raises `InvalidRequest` for a model or settings that cannot be trained.
    """
    from ebbtide.trainer.learning.torch_threads import limit_threads

    began = time.monotonic()
    limit_threads(threads)  # before anything imports torch
    from ebbtide.trainer.learning.local_learning import LocalLearning, choose_device

    # A reference costs a forward, which is measured with stale samples.
    spec = replace(spec, trainer=replace(spec.trainer, kl_coefficient=0.0))
    device = choose_device(device)
    learning = LocalLearning(spec, source=Path(spec.model), device=device, keep_published=False)
    start_s = time.monotonic() - began
    tell(f"loaded in {start_s:.1f} s")
    measuring = TrainerMeasuring(learning, spec, prompt_tokens, tell)
    measuring.run(seconds)
    return measuring.measured(start_s, folder, device)


class TrainerMeasuring:
    def __init__(
        self, learning: "LocalLearning", spec: RunSpec, prompt_tokens: int, tell: Callable[[str], None]
    ) -> None:
        self._learning, self._spec, self._prompt, self._tell = learning, spec, prompt_tokens, tell
        self._draw = Random(f"{spec.seed} lengths")
        self._numbers = count(1)
        self._work: list[LearnerWork] = []

    def run(self, seconds: float) -> None:
        steps = plan_steps(self._spec)
        self._step(steps[0])  # the first one allocates memory
        end, round_number, order = time.monotonic() + seconds, 0, steps
        while time.monotonic() < end:
            round_number += 1
            for step in order:
                if time.monotonic() >= end:
                    return
                work = self._step(step)
                self._work.append(work)
                left = max(0.0, end - time.monotonic())
                kind = f"{step.samples} samples of up to {step.response} tokens"
                self._tell(f"round {round_number}, {left:.0f} s left: {kind}, {work.seconds:.2f} s")
            order = Random(f"{self._spec.seed} round {round_number}").sample(steps, len(steps))

    def measured(self, start_s: float, folder: Path, device: str) -> TrainerMeasurements:
        from ebbtide.client.publisher.tensor_snapshots import TensorSnapshot
        from ebbtide.trainer.learning.local_learning import device_name
        from ebbtide.weights.patch import warm_up
        from ebbtide.weights.version_encoding import Described, encode_version

        warm_up()  # compiles the kernels
        before, after = TensorSnapshot(), TensorSnapshot()
        before.take(self._learning.tensors())
        base = Described(before.tensors, encode_version(before.tensors).result().entries)
        after.take(self._learning.tensors())  # allocates memory
        self._step(plan_steps(self._spec)[0])
        began = time.monotonic()
        after.take(self._learning.tensors())
        taken = time.monotonic()
        encoded = encode_version(after.tensors, base).result()
        return TrainerMeasurements(
            device=device_name(device),
            work=tuple(self._work),
            start_s=start_s,
            snapshot_s=taken - began,
            encode_s=time.monotonic() - taken,
            checkpoint_s=self._checkpoint_s(folder),
            weights_bytes=sum(tensor.data.nbytes for tensor in after.tensors),
            patch_bytes=sum(sum(patch.sizes) for patch in encoded.patches),
            micro_batch_tokens=self._spec.trainer.micro_batch_tokens,
        )

    def _checkpoint_s(self, folder: Path) -> float:
        from ebbtide.trainer.training_checkpoint import TrainingState

        state = TrainingState(run_id="profile", lineage="profile", step=1, version=_VERSION)
        with tempfile.TemporaryDirectory(prefix=".profile-", dir=folder) as beside:
            began = time.monotonic()
            self._learning.checkpoint(Path(beside), state, keep=1)
            return time.monotonic() - began

    def _step(self, step: MeasuredStep) -> LearnerWork:
        samples, number = list(self._samples(step)), next(self._numbers)
        began = time.monotonic()
        self._learning.train(samples, step=number, version=_VERSION)
        seconds, trainer = time.monotonic() - began, self._spec.trainer
        rng = Random(f"{self._spec.seed}/{number}")  # as the learner shuffles
        parts = [part for _ in range(trainer.epochs) for part in minibatches(samples, trainer.minibatches, rng)]
        packed = self._learning.packed
        micro = [part for one in parts for part in micro_parts(one, trainer.micro_batch_tokens, packed=packed)]
        if packed:
            sizes = [(1, sample.length) for part in micro for sample in part]
        else:
            sizes = [(len(part), max(sample.length for sample in part)) for part in micro]
        return LearnerWork(
            seconds=seconds,
            updates=len(parts),
            micro_batches=len(micro),
            tokens=sum(rows * longest for rows, longest in sizes),
            pairs=sum(rows * longest * longest / 2 for rows, longest in sizes),
            forwards=int(step.stale or (trainer.truncated_importance_sampling and len(parts) > 1)),
        )

    def _samples(self, step: MeasuredStep) -> Iterator["TrainingSample"]:
        """Samples of half to all of the longest response."""
        import numpy as np

        from ebbtide.trainer.learning.training_batches import TrainingSample

        for number in range(step.samples):
            response = self._draw.randint(-(-step.response // 2), step.response)
            tokens = self._prompt + response
            yield TrainingSample(
                ids=np.arange(tokens, dtype=np.int64) % _IDS,
                mask=np.ones(response, dtype=np.bool_),
                logprobs=np.full(response, -1.0, dtype=np.float32),
                versions=np.full(response, _VERSION - step.stale, dtype=np.int64),
                advantage=1.0 if number % 2 else -1.0,
            )
