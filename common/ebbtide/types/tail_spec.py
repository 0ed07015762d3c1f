"""Defines `[tail]` of a run's spec: what shortens the tail of its steps."""

from typing import Annotated, Literal

from msgspec import Meta, Struct


class TailSpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    #: Who starts first. "lengths": one sample of each group, then the longest ones by forecast. With `max_staleness` 0
    #: a step ends sooner so. "submitted": groups start one after another, as they were submitted.
    order: Literal["lengths", "submitted"] = "submitted"
    #: "grouped": workers whose `vllm.speculation` allows it draft from the tokens that they have of a rollout's group.
    speculation: Literal["grouped", "off"] = "off"
    #: Most seconds of the scoring of one response; None: those of `batch.episode_timeout_s`.
    reward_timeout_s: Annotated[float, Meta(gt=0)] | None = None
    #: "whole_groups": a step trains on the groups that are whole first. The others go on, and are trained on at most
    #: `batch.max_staleness` steps later. Generation does not run ahead of training otherwise.
    rounds: Literal["off", "whole_groups"] = "off"
    #: Groups on their way at the begin of a step, as a multiple of `batch.groups_per_step`. More of them make shorter
    #: steps, and older tokens.
    rounds_excess: Annotated[float, Meta(ge=1, le=2)] = 2.0
