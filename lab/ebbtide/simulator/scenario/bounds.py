"""Bounds of the numbers in a scenario. Each keeps a slip of the keyboard from becoming a run that never ends."""

from typing import Annotated, Final, TypeAlias

from msgspec import Meta

from ebbtide.checked_files.record_check import OrTable
from ebbtide.simulator.engines.derived_profile import EngineOn, TrainerOn

#: Rollouts of one step, over all of its groups: the simulator holds them all at once.
MOST_STEP_ROLLOUTS: Final = 1_000_000
#: Names of pools and runs become parts of workers' and rollouts' ids.
Name: TypeAlias = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$")]
Label: TypeAlias = Annotated[str, Meta(min_length=1, max_length=200)]
#: A file relative to the scenario's folder, or the name of a profile that is derived or comes with the simulator.
Reference: TypeAlias = Annotated[str, Meta(min_length=1, max_length=1024)]
EngineReference: TypeAlias = Annotated[Reference, OrTable(EngineOn)]
TrainerReference: TypeAlias = Annotated[Reference, OrTable(TrainerOn)]
#: 1e8 s are three years.
Seconds: TypeAlias = Annotated[float, Meta(ge=0, le=1e8)]
LongerThanZero: TypeAlias = Annotated[float, Meta(gt=0, le=1e8)]
Share: TypeAlias = Annotated[float, Meta(ge=0, le=1)]
#: A factor on lengths, times or rates.
Factor: TypeAlias = Annotated[float, Meta(ge=1e-4, le=1e4)]
#: A machine that is lost every minute never gets anything done.
PerHour: TypeAlias = Annotated[float, Meta(ge=0, le=60)]
Dollars: TypeAlias = Annotated[float, Meta(ge=0, le=1e6)]
Gbps: TypeAlias = Annotated[float, Meta(gt=0, le=1e5)]
Machines: TypeAlias = Annotated[int, Meta(ge=0, le=20_000)]
Tokens: TypeAlias = Annotated[int, Meta(ge=1, le=16 << 20)]
