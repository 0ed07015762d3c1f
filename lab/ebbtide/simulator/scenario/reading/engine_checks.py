"""Checks that every engine of the fleet can hold the rollouts that it may get."""

from typing import Final

from ebbtide.simulator.scenario.draws.quantity_draws import curve
from ebbtide.simulator.scenario.inputs.input_tables import InputTables
from ebbtide.simulator.scenario.reading.known_names import EngineLimits, KnownNames
from ebbtide.simulator.scenario.reading.scenario_source import ScenarioSource
from ebbtide.simulator.scenario.scenario import ScenarioSpec
from ebbtide.simulator.scenario.training_run import TrainingRun

#: One draw of a standard normal in a billion lies beyond. No simulation has as many rollouts.
_RARE: Final = 6.0


def check_engines(spec: ScenarioSpec, tables: InputTables, source: ScenarioSource, known: KnownNames) -> None:
    """Note pools whose engines could not run their slots, or a rollout of any run even alone."""
    if known.engine_limits is None:
        return
    most = {run.name: most_tokens(run, tables) for run in spec.run}
    longest = max(most, key=lambda name: most[name])
    found: dict[str, EngineLimits] = {}
    for index, pool in enumerate(spec.fleet):
        if pool.engine not in found:
            found[pool.engine] = known.engine_limits(pool.engine, source.folder)
        limits = found[pool.engine]
        if min(pool.slots, limits.sequences) > limits.batched_tokens:
            told = f"must be at most {limits.batched_tokens}, the batched_tokens of the engine; lower it"
            source.note(("fleet", index, "slots"), told)
        # The last token of a response is never read.
        if most[longest] - 1 > limits.kv_tokens:
            told = (
                f"its kv.tokens hold {limits.kv_tokens} tokens, and a rollout of run {longest!r} may have "
                f"{most[longest]}; take another profile, or lower the run's cap or context"
            )
            source.note(("fleet", index, "engine"), told)


def most_tokens(run: TrainingRun, tables: InputTables) -> int:
    """The most tokens that a rollout of the run may have, prompt and response together."""
    around, quantiles = run.environment, tables.quantiles
    prompt = curve(run.prompt_tokens, quantiles, run.context - 1)(_RARE)
    response = curve(run.lengths, quantiles, run.cap)(_RARE)
    turns = max(1.0, curve(around.turns, quantiles, 1000.0)(_RARE))
    added = curve(around.adds_tokens, quantiles)(_RARE)
    whole = max(1, round(prompt)) + round(turns) * max(1, round(response)) + (round(turns) - 1) * round(added)
    return min(run.context, whole)
