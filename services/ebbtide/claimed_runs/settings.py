"""Defines the settings that trainer and driver share."""

from typing import Annotated

from msgspec import Meta, Struct

from ebbtide.auth.security import ClientSecurity
from ebbtide.environments import BUILT_IN
from ebbtide.runtime import ProcessSettings


class AllowedEnvironments(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    allowed: Annotated[
        tuple[str, ...],
        Meta(
            description="environments that runs may name; * stands for any characters",
            extra={"shared": "environments_allowed"},
        ),
    ] = tuple(sorted(BUILT_IN))


class WorkSettings(ProcessSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    coordinator: Annotated[
        str, Meta(description="address of the coordinator; separate several by commas", extra={"shared": True})
    ] = "127.0.0.1:7600"
    relay: Annotated[str, Meta(description="address of the weight-relay", extra={"shared": True})] = "127.0.0.1:7610"
    security: ClientSecurity = ClientSecurity()
    run_id: Annotated[str, Meta(description="run to work on; empty: all runs, one after another")] = ""
    once: Annotated[bool, Meta(description="end when the run has ended")] = False
    holder: Annotated[
        str, Meta(description="unique name of this process; a restart under the same name regains its lease at once")
    ] = ""
    patience_s: Annotated[float, Meta(gt=0, description="unreachable services interrupt work after this")] = 60.0
    environments: AllowedEnvironments = AllowedEnvironments()
    model_roots: Annotated[
        tuple[str, ...], Meta(description="folders in which a run's model may be", extra={"shared": True})
    ] = ("/",)
    output_roots: Annotated[
        tuple[str, ...], Meta(description="folders in which a run's output may be", extra={"shared": True})
    ] = (".",)
