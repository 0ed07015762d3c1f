"""Says which profiles and policies there are, so that others are refused."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal, TypeAlias

from msgspec import Struct

ProfileKind: TypeAlias = Literal["engine", "trainer"]


class EngineLimits(Struct, frozen=True, kw_only=True):
    """What an engine can hold."""

    kv_tokens: int  # in whole blocks
    sequences: int  # that run at once
    batched_tokens: int  # of one step


class KnownNames(Struct, frozen=True, kw_only=True):
    """What there is to name. None: any name passes, for callers who check it later."""

    policies: Mapping[str, type[Struct]] | None = None  # and the parameters of each
    single_run: frozenset[str] = frozenset()  # policies that know one run
    #: Of the profile that a scenario in the folder names. None: limits are not checked.
    engine_limits: Callable[[str, Path], EngineLimits] | None = None
    #: What is wrong with the profile that a scenario in the folder names; nothing if it is a good one.
    profile_problem: Callable[[ProfileKind, str, Path], str] | None = None
