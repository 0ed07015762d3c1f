"""The page about the keys of a scenario, from the structs that parse it."""

from collections.abc import Iterator
from typing import Final

from msgspec import Struct

from ebbtide.reference.field_tables import cell, documented, field_table, paragraphs
from ebbtide.simulator.engines.roofline import EngineOn, TrainerOn
from ebbtide.simulator.scenario.machine_pool import GrantTapeSpec, MachinePool, SpotTraceSpec
from ebbtide.simulator.scenario.quantity_spec import LengthSpec, QuantitySpec
from ebbtide.simulator.scenario.scenario import PlannedFault, PolicyChoice, ScenarioSpec
from ebbtide.simulator.scenario.training_run import SimulatedEnvironment, SimulatedRewards, TrainingRun
from ebbtide.simulator.simulate import POLICIES

_HEAD: Final = """# Scenarios

A scenario is a TOML file for `ebbtide simulate`: machines, the runs that they serve, faults, and the policy
that decides. [`examples/scenarios/`](../../examples/scenarios) has complete ones.

```toml
name = "six spot machines"
steps = 20                        # of each run; or hours, whichever comes first

[[fleet]]
name = "spot"
kind = "spot"
engine = { model = "Qwen3-14B", gpu = "H100", tp = 2 }   # or the file of a profile
workers = 6
losses_per_hour = 0.5

[[run]]
name = "math"
trainer = { model = "Qwen3-14B", gpu = "H100", gpus = 8 }
lengths = { median = 700, sigma = 0.8, correlation = 0.7 }
environment = { turns = { low = 1, high = 8 }, wait_s = { median = 2.0, sigma = 1.0, most = 60 } }
```

The same scenario and seed give the same machines, losses and responses, whatever the policy. Each draw depends
on the seed and on names alone: a pool that is added changes nothing for the others. Paths are relative to the
scenario's folder. Times are seconds of virtual time, unless the key says hours. Tables are CSV files with a
head; lines that begin with `#` are comments.

A scenario that is wrong is refused with file, line, column, field and a remedy for each problem, up to 20 at
once:

```
first.toml:9:1: fleet[0].wrokers: is unknown; did you mean workers?
first.toml:14:20: run[0].lengths.mean: must be between 0 and 8192, the least and the most
```
"""
_SECTIONS: Final[list[tuple[str, type[Struct]]]] = [
    ("Top level", ScenarioSpec),
    ("Machines: `[[fleet]]`", MachinePool),
    ("Spot traces: `trace` of a fleet", SpotTraceSpec),
    ("Grants: `grants` of a fleet", GrantTapeSpec),
    ("Runs: `[[run]]`", TrainingRun),
    ("Environments: `environment` of a run", SimulatedEnvironment),
    ("Rewards: `rewards` of a run", SimulatedRewards),
    ("Quantities", QuantitySpec),
    ("Response lengths: `lengths` of a run", LengthSpec),
    ("Faults: `[[fault]]`", PlannedFault),
    ("Policies: `[policy]`", PolicyChoice),
]
_PROFILES: Final = """## Engines and trainers

`engine` of a fleet and `trainer` of a run are one of three: a table, as below, from which a profile is derived
by the GPU's data sheet and the model's configuration; the same in short, such as `"h100x2-qwen3-14b"`; or a
file such as `"own.toml"` with times that were measured and fitted ([profiles](../guides/simulate.md)). A derived
profile has neither boot nor checkpoint times, and nothing of the framework around the model. `ebbtide simulate
--list` shows the models and GPUs, and on how few GPUs an engine has room for a model.
"""
_RIVALS: Final = """All policies meet the same fleet and the same work. Rivals as published (RLBoost, RollPacker,
Seer, ROSE's turns, verl's hybrid), an oracle, and Ebbtide without some of its parts are in the repository's
`benchmarks/rivals`, each with what it does not know. Benchmarks simulate them; scenario files do not name them.
"""


def page() -> Iterator[str]:
    """Lines of docs/reference/scenarios.md."""
    yield from (*_HEAD.splitlines(), "")
    for title, kind in _SECTIONS:
        fields = [field for field in documented(kind) if field.meaning]
        if kind is LengthSpec:
            fields = [field for field in fields if field.name not in QuantitySpec.__struct_fields__]
        yield from (f"## {title}", "", *paragraphs(kind), *field_table(fields))
        if kind is GrantTapeSpec:
            yield from (*_PROFILES.splitlines(), "")
            yield from ("An engine:", "", *field_table(list(documented(EngineOn))))
            yield from ("A trainer:", "", *field_table(list(documented(TrainerOn))))
    yield from ("| `name` | `params`, with defaults | what it does |", "|---|---|---|")
    for name, policy in POLICIES.items():
        params = "; ".join(f"`{field.name}` {field.default}: {field.meaning}" for field in documented(policy))
        yield f'| `"{name}"` | {cell(params) or "none"} | {cell(" ".join(paragraphs(policy)))} |'
    yield from ("", *_RIVALS.splitlines(), "")
