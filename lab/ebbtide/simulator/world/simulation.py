"""Builds a simulation of a scenario under a policy, with profiles, and lets its time pass.

All policies see the same state: the coordinator's. What a rival is not told, its own docstring says.
"""

from collections.abc import Callable, Sequence
from functools import partial
from math import inf
from pathlib import Path
from typing import Protocol

from ebbtide.coordinator.settings import CoordinatorSettings
from ebbtide.simulator.engines.engine_profile import EngineProfile
from ebbtide.simulator.engines.profile_files import read_profile
from ebbtide.simulator.engines.trainer_profile import SampleLength, TrainerProfile
from ebbtide.simulator.outcome import Outcome, SimulationBooks, SimulationProgress
from ebbtide.simulator.scenario.input_tables import fixed_price
from ebbtide.simulator.scenario.machine_pool import MachinePool
from ebbtide.simulator.scenario.scenario import Scenario
from ebbtide.simulator.scenario.training_run import TrainingRun
from ebbtide.simulator.scenario.workload import Turn, Workload
from ebbtide.simulator.world.fleet.attempt_host import FlushTerms
from ebbtide.simulator.world.fleet.machine_pools import MachinesOfPool, PlannedFaults
from ebbtide.simulator.world.fleet.simulated_worker import SimulatedWorker, WorkerTerms
from ebbtide.simulator.world.fleet.version_pulls import VersionPulls, WeightTerms
from ebbtide.simulator.world.training.simulated_driver import SimulatedDriver, SimulatedScoring, StepProgress
from ebbtide.simulator.world.training.simulated_trainer import SimulatedTrainer, TrainingTimes
from ebbtide.simulator.world.training.step_rounds import Rounds, Sample
from ebbtide.simulator.world.training.trainer_loan import FixedWindow, LoanWindow, TrainerLoan
from ebbtide.simulator.world.virtual_coordinator import Decider, RunAccount, VirtualCoordinator
from ebbtide.simulator.world.virtual_time import VirtualTime
from ebbtide.types.fleet import WorkerKind
from ebbtide.types.run import TailSpec

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


class Policy(Protocol):
    """A policy for a whole scenario."""

    @property
    def stream_batch(self) -> int | None:
        """The fewest samples that a trainer learns from before a step's last rollout ends; None: it waits for that."""
        ...

    def decider(self, coordinator: VirtualCoordinator) -> Decider:
        """What decides where rollouts run."""
        ...

    def rounds(self, run: TrainingRun) -> Rounds:
        """Which rollouts a step of the run begins with, and when it has enough."""
        ...

    def window(self, decider: Decider, lent: MachinePool) -> LoanWindow:
        """For how long the trainer's devices generate in each step, as the pool `lent`."""
        ...


Say = Callable[[SimulationProgress], None]
#: How often people hear of progress, in simulated seconds.
_SAY_EVERY_S = 10.0
#: Steps of a run that only time ends.
_ENDLESS = 1_000_000


class Simulation:
    def __init__(
        self,
        scenario: Scenario,
        seed: int,
        policy: Policy,
        profiles: Profiles,
        settings: CoordinatorSettings | None = None,
    ) -> None:
        self._scenario, self._seed, self._policy, self._profiles = scenario, seed, policy, profiles
        self._time, self._books = VirtualTime(), SimulationBooks()
        self._pulls = VersionPulls(self._time, scenario.relay_gbps * _BYTES_PER_GBIT)
        self._coordinator = VirtualCoordinator(self._time, self._books, self._pulls, policy.decider, settings)
        self._workload = Workload(scenario, seed)
        self._loans = {run.name: TrainerLoan(self._time, self._window_of(run)) for run in scenario.run}
        self._trainers: dict[str, SimulatedTrainer] = {}
        self._drivers: dict[str, SimulatedDriver] = {}
        self._pools = {pool.name: self._machines(pool) for pool in scenario.fleet}
        for run in scenario.run:
            self._add_run(run)
        self._faults = PlannedFaults(scenario.fault, seed, self._time, self._pools, self._trainers)

    def run(self, say: Say) -> Outcome:
        """Let time pass until the scenario's end, or until all steps are trained."""
        for pool in self._pools.values():
            pool.begin()
        self._coordinator.begin()
        for run in self._scenario.run:
            self._time.at(run.start_s, self._trainers[run.name].begin)
        self._pass_time(say)
        return self._outcome()

    def _pass_time(self, say: Say) -> None:
        time, until_s, trainers = self._time, self._scenario.until_s, self._trainers.values()
        of_steps, said = self._of_steps(), -inf
        until = until_s if self._scenario.hours is not None else 0.0
        while time.next <= until_s and not all(one.done for one in trainers):
            time.step()
            if time.now - said >= _SAY_EVERY_S:
                said = time.now
                say(SimulationProgress(at_s=said, until_s=until, steps=len(self._books.steps), of_steps=of_steps))
        if not all(one.done for one in trainers):
            time.now = until_s

    def _of_steps(self) -> int:
        steps = [self._scenario.steps_of(run) for run in self._scenario.run]
        return sum(one for one in steps if one is not None) if all(steps) else 0

    def _window_of(self, run: TrainingRun) -> LoanWindow:
        lent = [pool for pool in self._scenario.fleet if self._owner(pool) == run.name]
        return self._policy.window(self._coordinator.decider, lent[0]) if lent else FixedWindow(None)

    def _owner(self, pool: MachinePool) -> str | None:
        """The run on whose trainer's devices the pool's engines live; the only run needs no name."""
        return (pool.run or self._scenario.run[0].name) if pool.kind == "trainer" else None

    # Its parts.

    def _machines(self, pool: MachinePool) -> MachinesOfPool:
        scenario = self._scenario
        profile = self._profiles.engine(pool.engine)
        lent = pool.kind == "trainer"
        terms = WorkerTerms(
            pool=pool.name,
            kind=WorkerKind[pool.kind.upper()] if not lent else WorkerKind.RESERVED,
            profile=profile,
            max_model_len=max(run.context for run in scenario.run),
            slots=pool.slots,
            flush=FlushTerms(pool.flush_s, pool.flush_tokens),
            heartbeat_s=self._coordinator.settings.heartbeat_s,
            seed=self._seed,
            link_bytes_per_s=inf if lent else pool.link_gbps * _BYTES_PER_GBIT,
        )
        machines = MachinesOfPool(pool, scenario, self._seed, self._time, self._books, partial(self._worker, terms))
        if (owner := self._owner(pool)) is not None:
            machines.came = self._loans[owner].add
        return machines

    def _worker(self, terms: WorkerTerms, name: str, speed: float) -> SimulatedWorker:
        return SimulatedWorker(name, terms, self._time, self._coordinator, self._books, speed=speed)

    def _add_run(self, run: TrainingRun) -> None:
        name, steps = run.name, self._scenario.steps_of(run) or _ENDLESS
        self._pulls.add_run(name, self._profiles.weights(run))

        def announce(version: int, step: int) -> None:
            self._give_back(self._loans[name].window.surplus())
            self._coordinator.announce(name, version, step)
            driver.announced(version, step)

        def opened(progress: StepProgress) -> None:
            trainer.opened(progress)
            self._faults.step_opened(name, progress.number)

        trainer = self._trainers[name] = SimulatedTrainer(
            name,
            steps=steps,
            stream_batch=self._policy.stream_batch,
            time=self._time,
            times=self._profiles.training(run),
            books=self._books,
            loan=self._loans[name],
            announce=announce,
        )
        driver = self._drivers[name] = SimulatedDriver(
            name,
            steps=steps,
            max_staleness=run.max_staleness,
            time=self._time,
            coordinator=self._coordinator,
            rounds=self._policy.rounds(run),
            turns=partial(self._turns, run),
            scoring=SimulatedScoring(run.rewards, self._time),
            opened=opened,
            scored=trainer.scored,
        )
        model = next((pool.engine for pool in self._scenario.fleet), "")
        account = RunAccount(
            name=name,
            model=model,
            max_tokens=run.cap,
            share=run.share,
            tail=TailSpec(order=run.order),
            groups=run.prompts,
        )
        self._coordinator.add_run(account, driver)

    def _give_back(self, machine: str | None) -> None:
        for pool in self._pools.values():
            if machine is not None and pool.pool.kind == "spot" and machine in pool.present:
                pool.lose(machine, silently=False)

    def _turns(self, run: TrainingRun, sample: Sample) -> Sequence[Turn]:
        step, prompt = divmod(sample.prompt, run.prompts)
        return self._workload.turns(run.name, step, prompt, sample.sample)

    def _outcome(self) -> Outcome:
        books, now = self._books, self._time.now
        for pool in self._pools.values():
            pool.settle()
        for run in self._scenario.run:
            end_s = min(now, self._trainers[run.name].done_s)
            books.pay(f"{run.name} trainer", fixed_price(run.trainer_price_per_hour).cost(run.start_s, end_s))
        for worker in (worker for pool in self._pools.values() for worker in pool.present.values()):
            worker.host.look()
            books.retire(worker.host.engine)
        return Outcome(
            scenario=self._scenario.name,
            seed=self._seed,
            simulated_s=now,
            steps=books.steps,
            pools=books.pools(now),
            tokens=books.tokens,
            moves=books.moves,
            resumes=books.resumes,
            preemptions=books.preemptions,
            installs=books.installs,
            weight_bytes=self._pulls.bytes,
            unfinished=sum(driver.open_rollouts for driver in self._drivers.values()),
            spans=books.spans,
            fleet=books.fleet,
        )
