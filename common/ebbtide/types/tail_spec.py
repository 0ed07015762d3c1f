"""Defines what a run does about the long tail of its steps: `[tail]` of its spec."""

from typing import Annotated, Literal

from msgspec import Meta, Struct


class TailSpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    #: "whole_groups": a step trains on the groups that are whole first. The others go on, and are trained on at most
    #: `batch.max_staleness` steps later. Generation does not run ahead of training otherwise.
    rounds: Literal["off", "whole_groups"] = "off"
    #: Groups on their way at the begin of a step, as a multiple of `batch.groups_per_step`. More of them make shorter
    #: steps, and older tokens.
    rounds_excess: Annotated[float, Meta(ge=1, le=2)] = 2.0
