"""Defines `[tail]` of a run's spec: what shortens the tail of its steps."""

from typing import Literal

from msgspec import Struct


class TailSpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    #: "grouped": workers draft from the tokens of a rollout's group. The coordinator passes on to each those that other
    #: workers make.
    speculation: Literal["grouped", "off"] = "off"
