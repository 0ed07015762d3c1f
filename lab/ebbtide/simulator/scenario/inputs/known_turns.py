"""Holds the turns of a run that was recorded, in place of distributions from which turns are drawn."""

from typing import NamedTuple

from msgspec import Struct


class KnownTurn(NamedTuple):
    """One request to an engine. Lengths in tokens."""

    prompt: int  # the whole context
    response: int
    wait_s: float  # until the episode's next turn


class KnownTurns(Struct, frozen=True):
    """steps -> groups -> samples -> turns. Each has at least one of the next."""

    steps: tuple[tuple[tuple[tuple[KnownTurn, ...], ...], ...], ...]
