"""Checks what the type of one value cannot express: values against each other, and names of what there must be."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

from msgspec import Struct

from ebbtide.checked_files import TomlPath, checked, suggestion
from ebbtide.simulator.scenario.input_tables import InputTables
from ebbtide.simulator.scenario.machine_pool import MachinePool
from ebbtide.simulator.scenario.quantity_spec import MOST_STEP_ROLLOUTS, QuantitySpec
from ebbtide.simulator.scenario.scenario import PlannedFault, ScenarioSpec, is_path
from ebbtide.simulator.scenario.scenario_source import ScenarioSource
from ebbtide.simulator.scenario.training_run import TrainingRun
from ebbtide.simulator.scenario.workload import curve

ProfileKind: TypeAlias = Literal["engine", "trainer"]


class EngineLimits(Struct, frozen=True, kw_only=True):
    """What an engine can hold."""

    kv_tokens: int  # in whole blocks
    sequences: int  # that run at once
    batched_tokens: int  # of one step


class KnownNames(Struct, frozen=True, kw_only=True):
    """What there is to name. None: any name passes, for callers who check it later."""

    policies: Mapping[str, type[Struct]] | None = None  # and the parameters of each
    single_run: frozenset[str] = frozenset()  # policies that know one run
    #: Of the profile that a scenario in the folder names. None: limits are not checked.
    engine_limits: Callable[[str, Path], EngineLimits] | None = None
    #: What is wrong with the profile that a scenario in the folder names; nothing if it is a good one.
    profile_problem: Callable[[ProfileKind, str, Path], str] | None = None


#: Where something is wrong, and what.
Wrong: TypeAlias = tuple[TomlPath, str]


def quantity_problems(spec: QuantitySpec, most: float | None) -> Iterator[Wrong]:
    """Yield all problems, at paths below the quantity. `most`: a bound that the quantity's owner has."""
    cap = min(limit for limit in (spec.most, most, float("inf")) if limit is not None)
    yield from _family_problems(spec)
    if (spec.low is None) != (spec.high is None):
        yield ("low" if spec.low is not None else "high",), "state both low and high"
    elif spec.low is not None and spec.high is not None and spec.low > spec.high:
        yield ("low",), f"must be at most high, {spec.high:.12g}"
    if spec.least > cap:
        yield ("least",), f"must be at most {cap:.12g}, the longest"
    if spec.mean is not None and not spec.least < spec.mean < cap:
        yield ("mean",), f"must be between {spec.least:.12g} and {cap:.12g}, the least and the most"
    if spec.value is not None and not spec.least <= spec.value * spec.stretch <= cap:
        yield ("value",), f"must be from {spec.least:.12g} to {cap:.12g}, the least and the most"


def _family_problems(spec: QuantitySpec) -> Iterator[Wrong]:
    families = [name for name in ("value", "file", "low", "median") if getattr(spec, name) is not None]
    if len(families) > 1:
        yield (families[1],), f"states {' and '.join(families)}; they are different distributions, so keep one"
    if families and families != ["median"]:
        for name in ("sigma", "tail_sigma"):
            if getattr(spec, name):
                yield (name,), f"is for log-normal values, and {families[0]} states others; take one out"
    if spec.mean is not None:
        for name in ("value", "median"):
            if getattr(spec, name) is not None:
                yield (name,), f"both {name} and mean set the scale; take one out"
        if spec.stretch != 1.0:
            yield ("stretch",), "both stretch and mean set the scale; take one out"
    if not families and spec.mean is None:
        yield (), "state a value, a file, low and high, a median or a mean"


def check_names(spec: ScenarioSpec, source: ScenarioSource, known: KnownNames) -> None:
    """Note all problems of a spec whose values have the right types."""
    for kind in ("fleet", "run"):
        _check_unique(kind, [one.name for one in getattr(spec, kind)], source)
    for path, text in _problems(spec):
        source.note(path, text)
    for index, pool in enumerate(spec.fleet):
        _check_profile(("fleet", index, "engine"), pool.engine, "engine", source, known)
    for index, run in enumerate(spec.run):
        _check_profile(("run", index, "trainer"), run.trainer, "trainer", source, known)
    _check_policy(spec, source, known)


def _problems(spec: ScenarioSpec) -> Iterator[Wrong]:
    runs = [run.name for run in spec.run]
    for index, pool in enumerate(spec.fleet):
        yield from _below(("fleet", index), _pool_problems(spec, pool))
    yield from _window_problems(spec, runs)
    for index, run in enumerate(spec.run):
        yield from _below(("run", index), _run_problems(spec, run))
    for index, fault in enumerate(spec.fault):
        yield from _below(("fault", index), _fault_problems(spec, fault, runs))


def _below(path: TomlPath, found: Iterable[Wrong]) -> Iterator[Wrong]:
    return (((*path, *inner), text) for inner, text in found)


def _check_unique(kind: str, names: list[str], source: ScenarioSource) -> None:
    for index, name in enumerate(names):
        if name in names[:index]:
            source.note((kind, index, "name"), f"{name!r} is the name of another one, too; choose another name")


def _check_profile(
    path: TomlPath, reference: str, kind: ProfileKind, source: ScenarioSource, known: KnownNames
) -> None:
    if is_path(reference) and not (source.folder / reference).is_file():
        source.note(path, f"there is no file {source.shown(reference)}; check the path")
    elif known.profile_problem is not None and (told := known.profile_problem(kind, reference, source.folder)):
        source.note(path, told)


def _check_policy(spec: ScenarioSpec, source: ScenarioSource, known: KnownNames) -> None:
    if known.policies is None:
        return
    name = spec.policy.name
    if name not in known.policies:
        source.note(("policy", "name"), unknown_policy(name, known.policies))
        return
    if name in known.single_run and len(spec.run) > 1:
        told = f"{name!r} knows one run, and there are {len(spec.run)}; choose ebbtide, or leave the others out"
        source.note(("policy", "name"), told)
    checked(known.policies[name], spec.policy.params, ("policy", "params"), source.note)


def unknown_policy(name: str, policies: Iterable[str]) -> str:
    told = f"there is no policy {name!r}{suggestion(name, list(policies))}"
    return f"{told}; rivals as published are in the repository's benchmarks/rivals"


def _pool_problems(spec: ScenarioSpec, pool: MachinePool) -> Iterator[Wrong]:
    if (pool.workers is None) == (pool.trace is None):
        told = "state one of workers and trace" if pool.workers is None else "states trace and workers; take one out"
        yield ("workers",), told
    if pool.price_per_hour and pool.prices is not None:
        yield ("prices",), "states prices and price_per_hour; take one out"
    if pool.from_s >= min(spec.until_s, pool.until_s if pool.until_s is not None else spec.until_s):
        yield ("from_s",), "must be before until_s and before the scenario's end"
    if pool.trace is not None and pool.trace.most == 0:
        yield ("trace", "most"), "must be at least 1; leave the pool out for none"
    yield from _kind_problems(pool, [run.name for run in spec.run])


def _kind_problems(pool: MachinePool, runs: list[str]) -> Iterator[Wrong]:
    if (pool.kind == "borrowed") != (pool.grants is not None):
        told = "hosts lend borrowed machines for a while; name a file t_s,share that says when"
        yield ("grants",), told if pool.kind == "borrowed" else 'only a pool of kind "borrowed" has grants'
    if pool.kind != "trainer":
        for name in ("run", "window_s"):
            if getattr(pool, name) is not None:
                yield (name,), 'is for pools of kind "trainer" alone; take it out or change the kind'
        return
    if pool.run is None and len(runs) > 1:
        yield ("run",), "name the run whose trainer has these engines"
    elif pool.run is not None and pool.run not in runs:
        yield ("run",), f"there is no run {pool.run!r}{suggestion(pool.run, runs)}"
    if pool.trace is not None:
        yield ("trace",), "a trainer's machines come and go with it; state workers"


def _window_problems(spec: ScenarioSpec, runs: list[str]) -> Iterator[Wrong]:
    """A window that closes leaves the rest of a step to other engines. A run's first pool sets its window."""
    if any(pool.kind != "trainer" for pool in spec.fleet):
        return
    first: dict[str, int] = {}
    for index, pool in enumerate(spec.fleet):
        first.setdefault(pool.run or runs[0], index)
    if all(spec.fleet[index].window_s is not None for index in first.values()):
        told = "no other engines end a step whose window is over; take it out, or add a pool of another kind"
        for index in first.values():
            yield ("fleet", index, "window_s"), told


def _run_problems(spec: ScenarioSpec, run: TrainingRun) -> Iterator[Wrong]:
    if spec.hours is None and spec.steps_of(run) is None:
        yield ("steps",), "nothing ends this run; state hours or steps"
    if run.start_s >= spec.until_s:
        yield ("start_s",), f"must be before the scenario's end at {spec.until_s:.12g} s"
    if run.rollouts_per_step > MOST_STEP_ROLLOUTS:
        told = f"a step has {run.rollouts_per_step} rollouts; prompts * group must be at most {MOST_STEP_ROLLOUTS}"
        yield ("prompts",), told
    if 0 < run.dataset < run.prompts:
        yield ("dataset",), f"must be at least the {run.prompts} prompts of a step, or 0"
    if run.share.ceiling is not None and run.share.floor > run.share.ceiling:
        yield ("share", "floor"), f"must be at most the ceiling, {run.share.ceiling:.12g}"
    for name, most in (("prompt_tokens", run.context - 1), ("lengths", run.cap)):
        yield from _below((name,), quantity_problems(getattr(run, name), most))
    for name in run.environment.__struct_fields__:
        yield from _below(("environment", name), quantity_problems(getattr(run.environment, name), None))


def _fault_problems(spec: ScenarioSpec, fault: PlannedFault, runs: list[str]) -> Iterator[Wrong]:
    pools: dict[str, Any] = {pool.name: pool for pool in spec.fleet}
    if fault.kind == "trainer":
        if fault.pool is not None:
            yield ("pool",), "a trainer belongs to a run; take it out"
    elif fault.pool is None and len(pools) > 1:
        yield ("pool",), "name the pool whose machines it befalls"
    elif fault.pool is not None and fault.pool not in pools:
        yield ("pool",), f"there is no pool {fault.pool!r}{suggestion(fault.pool, pools)}"
    if fault.run is not None and fault.run not in runs:
        yield ("run",), f"there is no run {fault.run!r}{suggestion(fault.run, runs)}"
    elif fault.run is None and len(runs) > 1 and (fault.step is not None or fault.kind == "trainer"):
        yield ("run",), "name the run whose step or trainer it means"
    if fault.step is None and fault.at_s >= spec.until_s:
        yield ("at_s",), f"must be before the scenario's end at {spec.until_s:.12g} s"
    yield from _size_problems(spec, fault)


def _size_problems(spec: ScenarioSpec, fault: PlannedFault) -> Iterator[Wrong]:
    if fault.kind == "trainer":
        return
    for pool in spec.fleet:
        if pool.name == (fault.pool or spec.fleet[0].name) and fault.machines > (pool.workers or fault.machines):
            yield ("machines",), f"must be at most the {pool.workers} machines of the pool {pool.name!r}"


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
