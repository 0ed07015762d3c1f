"""Finds what a scenario's engines and trainers take for their work: from the profiles that it names."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from ebbtide.simulator.engines.engine_profile import EngineProfile
from ebbtide.simulator.engines.profile_files import read_profile
from ebbtide.simulator.engines.trainer_profile import SampleLength, TrainerProfile
from ebbtide.simulator.scenario.training_run import TrainingRun
from ebbtide.simulator.world.fleet.version_pulls import WeightTerms
from ebbtide.simulator.world.training.simulated_trainer import TrainingTimes

_BYTES_PER_GB = 1e9
_BYTES_PER_GBIT = 125e6


class Profiles(Protocol):
    """The profiles that a scenario names."""

    def engine(self, reference: str) -> EngineProfile: ...

    def training(self, run: TrainingRun) -> TrainingTimes: ...

    def weights(self, run: TrainingRun) -> WeightTerms: ...


class NamedProfiles(Profiles):
    """Profiles from files. `folder`: what relative paths start from."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)

    def engine(self, reference: str) -> EngineProfile:
        return read_profile(EngineProfile, reference, beside=self._folder)

    def training(self, run: TrainingRun) -> TrainingTimes:
        return ProfiledTraining(self._trainer(run), run)

    def weights(self, run: TrainingRun) -> WeightTerms:
        return version_bytes(self._trainer(run))

    def _trainer(self, run: TrainingRun) -> TrainerProfile:
        return read_profile(TrainerProfile, run.trainer, beside=self._folder)


class ProfiledTraining(TrainingTimes):
    """A trainer's times by its profile, and the link on which its versions leave."""

    def __init__(self, profile: TrainerProfile, run: TrainingRun) -> None:
        self._profile, self._every = profile, run.checkpoint_every
        #: Stale tokens need the trainer's own logprobs, which a forward computes first.
        self._forwards = 1 if run.max_staleness else 0
        self._upload_s = version_bytes(profile).patch_bytes / (run.publish_gbps * _BYTES_PER_GBIT)

    def start_s(self) -> float:
        return self._profile.delays.start_s

    def gradient_s(self, lengths: Sequence[int]) -> float:
        samples = [SampleLength(length) for length in lengths]
        return self._profile.gradient_s(samples, forwards=self._forwards) if samples else 0.0

    def update_s(self) -> float:
        return self._profile.costs.update_s

    def snapshot_s(self) -> float:
        return self._profile.delays.snapshot_s

    def publish_s(self) -> float:
        return self._profile.publish_s() + self._upload_s

    def checkpoint_s(self, step: int) -> float | None:
        return self._profile.delays.checkpoint_s if self._every and step % self._every == 0 else None


def version_bytes(profile: TrainerProfile) -> WeightTerms:
    """The bytes of a version, whole and as a patch."""
    dense = int(profile.weights_gb * _BYTES_PER_GB)
    patch = int(dense * profile.patch_share)
    return WeightTerms(dense_bytes=dense, patch_bytes=patch if patch < dense else 0)
