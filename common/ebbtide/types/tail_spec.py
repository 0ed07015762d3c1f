"""Defines `[tail]` of a run's spec: what shortens the tail of its steps."""

from typing import Literal

from msgspec import Struct


class TailSpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    #: Who starts first. "lengths": one sample of each group, then the longest ones by forecast. With `max_staleness` 0
    #: a step ends sooner so. "submitted": groups start one after another, as they were submitted.
    order: Literal["lengths", "submitted"] = "submitted"
