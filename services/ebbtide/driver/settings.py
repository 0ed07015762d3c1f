"""Defines the settings of the episode driver."""

from typing import Annotated

from msgspec import Meta

from ebbtide.run_settings import AllowedEnvironments, WorkSettings


class EnvironmentSettings(AllowedEnvironments, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Says how code of environments that are not built in runs: isolated, in processes of its own."""

    trust: Annotated[
        bool, Meta(description="run environments without isolation, with this user's files, tokens and network")
    ] = False
    user: Annotated[str, Meta(min_length=1, description="user that environments run as if the driver is root")] = (
        "nobody"
    )
    paths: Annotated[
        tuple[str, ...], Meta(description="folders that environments may read and import modules from")
    ] = ()
    network: Annotated[bool, Meta(description="give environments this host's network")] = False
    memory_mib: Annotated[int, Meta(ge=128, description="address space of one environment process, MiB")] = 4096


class DriverSettings(WorkSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    environments: EnvironmentSettings = EnvironmentSettings()
    environment_threads: Annotated[
        int,
        Meta(ge=1, le=1024, description="maximum concurrent calls of environment code, and maximum processes for it"),
    ] = 8
    scoring_processes: Annotated[
        int,
        Meta(
            ge=0,
            le=1024,
            description="maximum processes that compute the rewards of last responses; 0 leaves it to the processes "
            "of other steps",
        ),
    ] = 4
