"""Defines the settings of the trainer."""

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta

from ebbtide.errors import InvalidRequest
from ebbtide.grants import check_folder
from ebbtide.run_settings import WorkSettings
from ebbtide.types.run import GRPO


class TrainerSettings(WorkSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    allowed_trainers: Annotated[
        tuple[str, ...],
        Meta(description="trainers that runs may use; * stands for any characters", extra={"shared": True}),
    ] = (GRPO,)
    threads: Annotated[int, Meta(ge=0, description="CPU threads of torch; 0 leaves the choice to torch")] = 0
    device: Annotated[
        Literal["auto", "cpu", "cuda"], Meta(description="device to train on; auto takes cuda where there is one")
    ] = "auto"
    ranks: Annotated[
        int,
        Meta(ge=1, description="number of training processes on this host, each on a GPU of its own if there are GPUs"),
    ] = 1
    rank_timeout_s: Annotated[
        float, Meta(gt=0, description="with several ranks: seconds of silence of one after which all end")
    ] = 60.0
    generate: Annotated[
        bool, Meta(description="lend the device to workers of this host while the trainer waits for rollouts")
    ] = False
    grant_dir: Annotated[str, Meta(description="with generate: folder shared with the serving-guard of this host")] = ""
    window_s: Annotated[
        float,
        Meta(
            ge=0,
            description="with generate and runs that stream: seconds to lend in each step; 0 leaves them to the plan",
        ),
    ] = 0.0
    keep_checkpoints: Annotated[int, Meta(ge=1, description="number of a run's newest checkpoints to keep")] = 2
    keep_published: Annotated[
        bool, Meta(description="keep the last published weights on the GPU too if they fit, and find changes there")
    ] = True

    offload: Annotated[
        bool,
        Meta(description="keep the optimiser's moments in host memory: 8 bytes of a GPU less for each parameter"),
    ] = False

    tracked_samples: Annotated[
        int, Meta(ge=0, description="responses of each step in the trackers' tables, from the worst reward to the best")
    ] = 4
    wandb_project: Annotated[
        str, Meta(description="project of Weights & Biases to log runs to, with their samples; empty: none")
    ] = ""

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


def check_wandb(project: str) -> None:
    """Raises `InvalidRequest` if a project is given and the client of Weights & Biases is not installed."""
    if project and find_spec("wandb") is None:
        text = "needs the client of Weights & Biases: pip install 'ebbtide[wandb]', or leave it out"
        raise InvalidRequest(text, field="wandb_project")
