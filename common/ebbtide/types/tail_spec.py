"""Defines `[tail]` of a run's spec: what shortens the tail of its steps."""

from typing import Annotated, Literal

from msgspec import Meta, Struct


class TailSpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    #: "lengths": one sample of each group first, then those that will probably be the longest.
    order: Literal["submitted", "lengths"] = "submitted"
    #: "grouped": workers draft from the tokens of a rollout's group. The coordinator passes on to each those that other
    #: workers make.
    speculation: Literal["grouped", "off"] = "off"
    #: Most seconds of the scoring of one response; None: those of `batch.episode_timeout_s`.
    reward_timeout_s: Annotated[float, Meta(gt=0)] | None = None
    #: The limit of a scoring follows what right answers took, below `reward_timeout_s`.
    adaptive_rewards: bool = False
