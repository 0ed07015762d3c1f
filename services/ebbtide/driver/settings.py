"""Defines the settings of the episode driver."""

from typing import Annotated

from msgspec import Meta

from ebbtide.claimed_runs.settings import AllowedEnvironments, WorkSettings


class EnvironmentSettings(AllowedEnvironments, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Says how code of environments that are not built in runs: isolated, in processes of its own."""

    trust: Annotated[
        bool, Meta(description="run their code without isolation: with this user's files, tokens and network")
    ] = False
    user: Annotated[str, Meta(min_length=1, description="user that their code runs as, where the driver is root")] = (
        "nobody"
    )
    paths: Annotated[
        tuple[str, ...], Meta(description="folders that their code may read, and that modules are imported from")
    ] = ()
    network: Annotated[bool, Meta(description="give their code this host's network")] = False
    memory_mib: Annotated[int, Meta(ge=128, description="address space of one process of their code")] = 4096


class DriverSettings(WorkSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    environments: EnvironmentSettings = EnvironmentSettings()
    environment_threads: Annotated[
        int,
        Meta(ge=1, le=1024, description="most calls of environment code at the same time, and most processes for it"),
    ] = 8
    scoring_processes: Annotated[
        int,
        Meta(
            ge=0,
            le=1024,
            description="most processes that score last responses, beside those of other steps; 0: those score, too",
        ),
    ] = 4
