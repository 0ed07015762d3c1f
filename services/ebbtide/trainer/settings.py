"""Settings of the trainer, and what it shares with the episode driver."""

from typing import Annotated, Literal

from msgspec import Meta

from ebbtide.rpc.security import ClientSecurity
from ebbtide.runtime import ProcessSettings


class WorkSettings(ProcessSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a process finds the coordinator and the runs that it works on."""

    coordinator: Annotated[str, Meta(description="address of the coordinator", extra={"shared": True})] = (
        "127.0.0.1:7600"
    )
    relay: Annotated[str, Meta(description="address of the weight-relay", extra={"shared": True})] = "127.0.0.1:7610"
    security: ClientSecurity = ClientSecurity()
    run_id: Annotated[str, Meta(description="the run to work on; empty: whichever wants it, one after another")] = ""
    once: Annotated[bool, Meta(description="end when the run has ended")] = False
    holder: Annotated[
        str,
        Meta(description="unique name of this process; started again under it, it has its lease back at once"),
    ] = ""
    patience_s: Annotated[float, Meta(gt=0, description="how long a service may be away before work is dropped")] = 60.0


class TrainerSettings(WorkSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    threads: Annotated[int, Meta(ge=0, description="CPU threads of torch; 0: its own choice")] = 0
    device: Annotated[Literal["auto", "cpu", "cuda"], Meta(description="auto: cuda if there is one")] = "auto"
    ranks: Annotated[
        int, Meta(ge=1, description="processes on this host that train together, a GPU each where there are GPUs")
    ] = 1
    rank_timeout_s: Annotated[
        float, Meta(gt=0, description="with several ranks: how long one may be silent before all of them end")
    ] = 60.0
    keep_checkpoints: Annotated[int, Meta(ge=1, description="newest checkpoints kept of a run")] = 2
    keep_published: Annotated[
        bool, Meta(description="keep what was published last on the GPU too, if it has room, and find changes there")
    ] = True
