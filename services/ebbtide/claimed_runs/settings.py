"""Defines the settings that trainer and driver share."""

from typing import Annotated

from msgspec import Meta

from ebbtide.auth.security import ClientSecurity
from ebbtide.runtime import ProcessSettings


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
