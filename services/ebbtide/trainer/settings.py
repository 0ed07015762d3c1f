"""Defines the settings of the trainer."""

from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta

from ebbtide.claimed_runs.settings import WorkSettings
from ebbtide.errors import InvalidRequest
from ebbtide.grants import check_folder
from ebbtide.types.run import GRPO


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
    generate: Annotated[
        bool, Meta(description="lend the device to workers beside the trainer while it waits for rollouts")
    ] = False
    grant_dir: Annotated[str, Meta(description="with generate: folder shared with the serving-guard of this host")] = ""
    window_s: Annotated[
        float,
        Meta(
            ge=0, description="with generate and runs that stream: lend for so long in each step; 0: as it is planned"
        ),
    ] = 0.0
    keep_checkpoints: Annotated[int, Meta(ge=1, description="newest checkpoints of a run that are kept")] = 2
    keep_published: Annotated[
        bool, Meta(description="keep the last published weights on the GPU too, if it has room, and find changes there")
    ] = True

    def check_generate(self) -> None:
        """Raises `InvalidRequest` naming the setting if the device cannot be lent."""
        if not self.generate:
            if self.grant_dir:
                raise InvalidRequest("is for trainers that generate: set generate, or leave it out", field="grant_dir")
            if self.window_s:
                raise InvalidRequest("is for trainers that generate: set generate, or leave it out", field="window_s")
            return
        if not self.grant_dir:
            text = "is needed to generate: name the folder that the serving-guard of this host was given"
            raise InvalidRequest(text, field="grant_dir")
        check_folder(Path(self.grant_dir))
