"""Has the simulator play the real settings that were measured."""

import tempfile
from pathlib import Path
from statistics import fmean
from typing import Final

from msgspec.structs import replace

from benchmarks.simulator.fitted_profiles import fitted_engine
from benchmarks.simulator.measured import Measured
from benchmarks.simulator.real_scenario import real_scenario
from benchmarks.simulator.real_settings import RealSession
from ebbtide.simulator.engines.engine_profile import EngineProfile
from ebbtide.simulator.outcome import Outcome
from ebbtide.simulator.simulate import simulate

#: Blocks whose runs the cost of a prompt's begin is calibrated on: enough to even out, and simulated in seconds.
_CALIBRATED_ON: Final = 4
#: No engine here takes longer than a few steps to take a prompt in.
_DEAREST_PROMPT_S: Final = 0.032
_HALVINGS: Final = 6


class SessionSimulator:
    """Simulates what a session measured, with profiles fitted to its profile blocks alone.

    A simulated run gets the very lengths of each response, and each interruption at its time within its step.
    """

    def __init__(self, session: RealSession) -> None:
        self._session = session
        self._prompt_s: float | None = None  # for an engine with a turn of the core; None: not calibrated yet

    def setting(self, measured: Measured) -> Outcome:
        """Raises `InvalidRequest` or `ValueError` if the session has too little to fit profiles to."""
        if self._prompt_s is None:
            self._prompt_s = self._calibrated_prompt_s()
        return self._play(measured, self._engine(measured.setting.served, self._prompt_s))

    def _play(self, measured: Measured, engine: EngineProfile) -> Outcome:
        with tempfile.TemporaryDirectory(prefix="ebb-real-") as folder:
            return simulate(real_scenario(measured, self._session, engine, Path(folder)), seed=self._session.seed)

    def _engine(self, whole_core: bool, prompt_s: float) -> EngineProfile:
        turned = fitted_engine(self._session, whole_core=False)
        engine = fitted_engine(self._session, whole_core=True) if whole_core else turned
        # Nothing measures this cost on the whole core: it is taken to shrink as a step's does.
        prompt_s *= engine.costs.base_s / turned.costs.base_s
        return replace(engine, costs=replace(engine.costs, prompt_s=prompt_s))

    def _calibrated_prompt_s(self) -> float:
        """The cost of a prompt's begin at which the blocks' own runs take as long as they did to generate.

        No window of steady decoding has it, and the first tokens of many prompts tell of their arrival.
        """
        runs = [run for block in self._session.blocks[:_CALIBRATED_ON] for run in block.trained]
        low, high = 0.0, _DEAREST_PROMPT_S
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            ratio = fmean(self._generation_ratio(run, middle) for run in runs)
            low, high = (middle, high) if ratio < 1.0 else (low, middle)
        return (low + high) / 2

    def _generation_ratio(self, run: Measured, prompt_s: float) -> float:
        """Simulated over real time of generation, over all steps but the first."""
        outcome = self._play(run, self._engine(False, prompt_s))
        simulated = sum(step.generated_s - step.opened_s for step in outcome.steps[1:])
        return simulated / sum(step.generated_s - step.opened_s for step in run.steps[1:])
