"""Declares the settings of the device-arbiter."""

from typing import Annotated, Final, Literal

from msgspec import Meta

from ebbtide.runtime import ProcessSettings
from ebbtide.types.grants import Residency

#: What `give_up` wishes of engines.
_PLACES: Final = {"nothing": Residency.AWAKE, "cache": Residency.HOST, "weights": Residency.AWAY}


class ArbiterSettings(ProcessSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of one device-arbiter."""

    grant_dir: Annotated[
        str, Meta(description="folder shared with trainer and workers, this user's own: the socket and the pages")
    ]
    give_up: Annotated[
        Literal["nothing", "cache", "weights"],
        Meta(
            description="what engines give up while the trainer has the device: keys and values (on a GPU all of its "
            "memory, with the weights in the host's), or the weights too, which come back from the host's mirror; "
            "nothing where both fit beside each other"
        ),
    ] = "cache"
    yield_ms: Annotated[
        int, Meta(ge=10, description="how long after its predicted step a worker may go on before it is stopped")
    ] = 250
    kill_s: Annotated[
        float, Meta(gt=0, description="how long a stopped worker waits for the device before it is killed")
    ] = 10.0
    max_stops: Annotated[
        int, Meta(ge=1, description="how often in ten minutes a worker is stopped; then it is killed")
    ] = 3
    memory_s: Annotated[
        float, Meta(gt=0, description="how long a worker may take to give up memory before it is killed")
    ] = 60.0
    settle_s: Annotated[
        float, Meta(ge=0, description="how long a new arbiter waits for the device's owner before it lends")
    ] = 5.0
    silent_s: Annotated[float, Meta(gt=0, description="silence of the owner after which its device is lent")] = 15.0

    @property
    def residency(self) -> Residency:
        """Where engines' weights are to be while the trainer has the device."""
        return _PLACES[self.give_up]
