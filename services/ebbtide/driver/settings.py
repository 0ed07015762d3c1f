"""Defines the settings of the episode driver."""

from typing import Annotated

from msgspec import Meta

from ebbtide.claimed_runs.settings import WorkSettings


class DriverSettings(WorkSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    environment_threads: Annotated[
        int, Meta(ge=1, le=1024, description="most calls of environment code at the same time")
    ] = 8
