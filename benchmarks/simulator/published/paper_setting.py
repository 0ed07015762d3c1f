"""Builds scenarios of papers, and simulates them under a policy."""

from collections.abc import Sequence
from typing import Final

from msgspec import Struct

from benchmarks.log_level import errors_only
from ebbtide.coordinator.settings import CoordinatorSettings
from ebbtide.simulator.engines.engine_profile import EngineProfile
from ebbtide.simulator.outcome import Outcome
from ebbtide.simulator.scenario.input_tables import InputTables
from ebbtide.simulator.scenario.machine_pool import MachinePool
from ebbtide.simulator.scenario.scenario import PlannedFault, Scenario
from ebbtide.simulator.scenario.training_run import TrainingRun
from ebbtide.simulator.world.fleet.version_pulls import WeightTerms
from ebbtide.simulator.world.simulation import Policy, Simulation

#: Tokens are stored so seldom, since only what is lost with a worker depends on it: seconds.
FLUSH_S = 1.0
#: Where nobody is lost and nobody asks for speeds, heartbeats change nothing but the time that a simulation takes.
_CALM_HEARTBEAT_S = 60.0
_NO_TABLES: Final = InputTables()
#: Heartbeats that may fail before a worker is lost.
_PATIENCE = 3.0


class PaperTimes(Struct, frozen=True, kw_only=True):
    """A trainer that papers describe by few numbers. Times in seconds."""

    token: float = 0.0  # per token of prompts and responses
    update: float = 0.0
    snapshot: float = 0.0

    def start_s(self) -> float:
        return 0.0

    def gradient_s(self, lengths: Sequence[int]) -> float:
        return self.token * sum(lengths)

    def update_s(self) -> float:
        return self.update

    def snapshot_s(self) -> float:
        return self.snapshot

    def publish_s(self) -> float:
        return 0.0

    def checkpoint_s(self, step: int) -> float:
        del step
        return 0.0


class PaperProfiles:
    """Engines by their names, and one trainer. `sent_gb`: bytes of a version on the wire."""

    def __init__(self, engines: Sequence[EngineProfile], times: PaperTimes, sent_gb: float = 0.0) -> None:
        self._engines, self._times = {one.name: one for one in engines}, times
        self._sent = round(1e9 * sent_gb)

    def engine(self, reference: str) -> EngineProfile:
        return self._engines[reference]

    def training(self, run: TrainingRun) -> PaperTimes:
        del run
        return self._times

    def weights(self, run: TrainingRun) -> WeightTerms:
        del run
        return WeightTerms(dense_bytes=self._sent, patch_bytes=0)


def co_located(engine: EngineProfile, engines: int, run: str) -> MachinePool:
    """Engines on the trainer's own devices."""
    return MachinePool(
        name="local", kind="trainer", engine=engine.name, workers=engines, run=run, slots=65_536, flush_s=FLUSH_S
    )


def simulated(
    fleet: Sequence[MachinePool],
    run: TrainingRun,
    policy: Policy,
    profiles: PaperProfiles,
    *,
    faults: Sequence[PlannedFault] = (),
    seed: int = 0,
    heartbeat_s: float = _CALM_HEARTBEAT_S,
    tables: InputTables = _NO_TABLES,
) -> Outcome:
    """Simulate until all steps of the run are trained. Policies that look at engines' speeds need quick heartbeats."""
    errors_only()
    scenario = Scenario(name=run.name, fleet=tuple(fleet), run=(run,), fault=tuple(faults), hours=200.0, tables=tables)
    settings = CoordinatorSettings(heartbeat_s=heartbeat_s, heartbeat_timeout_s=_PATIENCE * heartbeat_s)
    return Simulation(scenario, seed, policy, profiles, settings).run(lambda _: None)
