"""Settings that trainer and driver share."""

from typing import Annotated

from msgspec import Meta

from ebbtide.auth.security import ClientSecurity
from ebbtide.runtime import ProcessSettings


class WorkSettings(ProcessSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a process finds the coordinator and the runs that it works on."""

    coordinator: Annotated[
        str,
        Meta(description="address of the coordinator; of several, with commas between them", extra={"shared": True}),
    ] = "127.0.0.1:7600"
    relay: Annotated[str, Meta(description="address of the weight-relay", extra={"shared": True})] = "127.0.0.1:7610"
    security: ClientSecurity = ClientSecurity()
    run_id: Annotated[str, Meta(description="the run to work on; empty: whichever wants it, one after another")] = ""
    once: Annotated[bool, Meta(description="end when the run has ended")] = False
    holder: Annotated[
        str,
        Meta(description="unique name of this process; started again under it, it has its lease back at once"),
    ] = ""
    patience_s: Annotated[float, Meta(gt=0, description="how long a service may be away before work is dropped")] = 60.0
