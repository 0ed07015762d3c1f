"""Reads the SLO of served models: from flags for any model, and from a TOML file with a table for each other one."""

import tomllib
from pathlib import Path
from typing import Annotated, Any, Final, TypeAlias

from msgspec import Meta, Struct

from ebbtide.errors import InvalidRequest
from ebbtide.serving_guard.governor.budget_decider import LatencyTargets
from ebbtide.types.parse import parse

TtftMs: TypeAlias = Annotated[float, Meta(ge=0, description="target of the time to the first token; 0: by factor")]
TpotMs: TypeAlias = Annotated[float, Meta(ge=0, description="target of the time per later token; 0: by factor")]
TtftFactor: TypeAlias = Annotated[
    float, Meta(ge=0, description="that target as a factor over the engine's unloaded latency, learnt; 0: 1.6")
]
TpotFactor: TypeAlias = Annotated[
    float, Meta(ge=0, description="that target as a factor over the engine's unloaded latency, learnt; 0: 1.27")
]
Percentile: TypeAlias = Annotated[float, Meta(gt=0, le=100, description="percentile of requests that meet both")]
AimTtft: TypeAlias = Annotated[
    float,
    Meta(ge=0, le=1, description="part of the TTFT target that rollouts may use; 0: none while a request waits for it"),
]
AimTpot: TypeAlias = Annotated[
    float,
    Meta(
        ge=0,
        le=1,
        description="part of the room between unloaded time per token and target for rollouts; 0: idle time only",
    ),
]
AimGap: TypeAlias = Annotated[
    float, Meta(ge=1, description="longest pause between two tokens beside rollouts, as a multiple of the TPOT target")
]
AimSlowed: TypeAlias = Annotated[
    float, Meta(ge=1, description="most that rollouts slow a request's tokens down, as a multiple of the unloaded time")
]
_DEFAULT: Final = LatencyTargets()


class Slo(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The SLO of one served model, as flags or file state it. Each target is stated in one way."""

    ttft_ms: TtftMs = 0.0
    tpot_ms: TpotMs = 0.0
    ttft_factor: TtftFactor = 0.0
    tpot_factor: TpotFactor = 0.0
    percentile: Percentile = _DEFAULT.percentile
    aim_ttft: AimTtft = _DEFAULT.aim_ttft
    aim_tpot: AimTpot = _DEFAULT.aim_tpot
    aim_gap: AimGap = _DEFAULT.aim_gap
    aim_slowed: AimSlowed = _DEFAULT.aim_slowed

    def targets(self) -> LatencyTargets:
        """Targets for the governor. Raises `InvalidRequest` naming the field if a target is stated twice, or a factor
        is below 1."""
        given: dict[str, float] = {}
        for name in ("ttft", "tpot"):
            absolute, factor = getattr(self, f"{name}_ms"), getattr(self, f"{name}_factor")
            if absolute and factor:
                raise InvalidRequest(f"{name}_ms is set too; leave one out", field=f"{name}_factor")
            if factor and factor < 1:
                raise InvalidRequest(
                    "no request can be faster than the engine alone; give 1 or more", field=f"{name}_factor"
                )
            given[f"{name}_s"] = absolute / 1000
            if factor:
                given[f"{name}_factor"] = factor
        same = ("percentile", "aim_ttft", "aim_tpot", "aim_gap", "aim_slowed")
        return LatencyTargets(**{name: getattr(self, name) for name in same}, **given)


def read_slos(path: Path, default: Slo) -> dict[str, Slo]:
    """The tables of the file, by model name; keys that a table lacks have the default's value.

    Raises `InvalidRequest` naming file, model and key.
    """
    try:
        document = tomllib.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InvalidRequest(str(error), field=str(path)) from None
    return {model: _one(path, model, table, default) for model, table in document.items()}


def _one(path: Path, model: str, table: Any, default: Slo) -> Slo:
    where = f"{path}: {model}"
    if not isinstance(table, dict):
        raise InvalidRequest('must be a table: write the model\'s name as ["NAME"] above its keys', field=where)
    try:
        parse(Slo, table).targets()
        made = parse(Slo, {**_defaults(default, table), **table})
        made.targets()
    except InvalidRequest as error:
        raise InvalidRequest(str(error).removeprefix(f"{error.field}: "), field=f"{where}.{error.field}") from None
    return made


def _defaults(default: Slo, table: dict[str, Any]) -> dict[str, Any]:
    """The default's values, without those of a target that the table states."""
    values = {name: getattr(default, name) for name in default.__struct_fields__}
    for name in ("ttft", "tpot"):
        if {f"{name}_ms", f"{name}_factor"} & table.keys():
            values[f"{name}_ms"] = values[f"{name}_factor"] = 0.0
    return values
