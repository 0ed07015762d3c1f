"""Encodes simulated scenarios as JSON. The same scenarios and seeds give the same bytes: no clock, no host, no path."""

from collections.abc import Iterable, Sequence
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from ebbtide.simulator.outcome import Outcome
from ebbtide.simulator.report.scenario_figures import Figures, ScenarioFigures, figures

#: Grows when a field changes its meaning.
FORMAT: Final = 1


def figures_file(scenarios: Sequence[Sequence[Outcome]]) -> bytes:
    """Returns the file of several scenarios, of which the others are compared with the first.

    `outcomes` has each seed's steps, pools and counts; spans of machines are left out, as the picture shows them.
    """
    found = [figures(outcomes) for outcomes in scenarios]
    document = {
        "format": FORMAT,
        "kind": "simulation",
        "scenarios": [_scenario(one, found[0], outcomes) for one, outcomes in zip(found, scenarios, strict=True)],
    }
    return msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n"


def ratios(first: Figures, other: Figures) -> dict[str, float | None]:
    """The other's medians over the first one's; None where either is missing, or the first one's is 0."""
    return {name: _ratio(first, other, name) for name in other}


def _ratio(first: Figures, other: Figures, name: str) -> float | None:
    base, found = first.get(name), other[name]
    return found.median / base.median if base and found and base.median else None


def _scenario(one: ScenarioFigures, first: ScenarioFigures, outcomes: Iterable[Outcome]) -> dict[str, Any]:
    built: dict[str, Any] = msgspec.to_builtins(one)
    built["ratios_to_first"] = ratios(first.whole, one.whole)
    built["outcomes"] = [
        msgspec.to_builtins(replace(outcome, spans=[])) for outcome in sorted(outcomes, key=lambda one: one.seed)
    ]
    for outcome in built["outcomes"]:
        del outcome["spans"]
    return built
