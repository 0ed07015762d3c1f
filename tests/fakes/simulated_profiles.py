"""Profiles of a plain engine and trainer, in round numbers, for tests of simulations."""

from collections.abc import Sequence

from msgspec import Struct

from ebbtide.simulator.engines.engine_profile import EngineDelays, EngineProfile, KvCapacity, StepCosts
from ebbtide.simulator.scenario.training_run import TrainingRun
from ebbtide.simulator.world.fleet.version_pulls import WeightTerms

#: A step takes so long whatever it computes: each rollout makes 100 tokens/s.
STEP_S = 0.01
INSTALL_S = 0.5

ENGINE = EngineProfile(
    name="plain",
    model="plain",
    device="none",
    gpus=1,
    source="made up for tests",
    costs=StepCosts(base_s=STEP_S),
    kv=KvCapacity(tokens=1_000_000),
    weights_gb=1.0,
    delays=EngineDelays(install_s=INSTALL_S),
)


class PlainTimes(Struct, frozen=True, kw_only=True):
    """A trainer's times, all of them fixed but for a part per token."""

    begin: float = 1.0
    token: float = 0.0
    update: float = 2.0
    publish: float = 3.0
    checkpoint: float | None = None

    def start_s(self) -> float:
        return self.begin

    def gradient_s(self, lengths: Sequence[int]) -> float:
        return self.token * sum(lengths)

    def update_s(self) -> float:
        return self.update

    def snapshot_s(self) -> float:
        return 0.0

    def publish_s(self) -> float:
        return self.publish

    def checkpoint_s(self, step: int) -> float | None:
        return self.checkpoint


class PlainProfiles:
    """The same engine and trainer whatever a scenario names."""

    def __init__(self, engine: EngineProfile = ENGINE, times: PlainTimes | None = None) -> None:
        self._engine, self._times = engine, times or PlainTimes()

    def engine(self, reference: str) -> EngineProfile:
        return self._engine

    def training(self, run: TrainingRun) -> PlainTimes:
        return self._times

    def weights(self, run: TrainingRun) -> WeightTerms:
        return WeightTerms(dense_bytes=1_000_000_000, patch_bytes=50_000_000)
