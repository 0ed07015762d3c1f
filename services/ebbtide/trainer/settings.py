"""Defines the settings of the trainer."""

from typing import Annotated, Final, Literal

from msgspec import Meta

from ebbtide.claimed_runs.settings import WorkSettings

#: The `trainer.name` of the built-in trainer.
GRPO: Final = "grpo"


class TrainerSettings(WorkSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    allowed_trainers: Annotated[
        tuple[str, ...],
        Meta(description="trainers that runs may name; * stands for any characters", extra={"shared": True}),
    ] = (GRPO,)
    threads: Annotated[int, Meta(ge=0, description="CPU threads of torch; 0: torch's choice")] = 0
    device: Annotated[Literal["auto", "cpu", "cuda"], Meta(description="auto: cuda if there is one")] = "auto"
    ranks: Annotated[
        int, Meta(ge=1, description="processes on this host that train together, each on a GPU if any")
    ] = 1
    rank_timeout_s: Annotated[
        float, Meta(gt=0, description="with several ranks: silence of one after which all end")
    ] = 60.0
    keep_checkpoints: Annotated[int, Meta(ge=1, description="newest checkpoints of a run that are kept")] = 2
    keep_published: Annotated[
        bool, Meta(description="keep the last published weights on the GPU too, if it has room, and find changes there")
    ] = True
