"""Finds what a scenario's engines and trainers take for their work."""

from typing import Protocol

from ebbtide.simulator.engines.engine_profile import EngineProfile
from ebbtide.simulator.scenario.training_run import TrainingRun
from ebbtide.simulator.world.simulated_trainer import TrainingTimes
from ebbtide.simulator.world.version_pulls import WeightTerms


class Profiles(Protocol):
    """The profiles that a scenario names."""

    def engine(self, reference: str) -> EngineProfile: ...

    def training(self, run: TrainingRun) -> TrainingTimes: ...

    def weights(self, run: TrainingRun) -> WeightTerms: ...
