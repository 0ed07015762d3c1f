"""Defines the settings of the trainer."""

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta

from ebbtide.errors import InvalidRequest
from ebbtide.grants import check_folder
from ebbtide.run_settings import WorkSettings
from ebbtide.types.run import GRPO

#: Folders of all users. In each, one of this user's own is made, and refused if it is another's.
_IN_MEMORY, _ON_DISK = "/dev/shm", "/var/tmp"  # noqa: S108


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
    turns: Annotated[
        bool,
        Meta(
            description="take turns on the device with the trainers of other runs, through the serving-guard of this "
            "host, also for a run that does not ask for it"
        ),
    ] = False
    grant_dir: Annotated[
        str, Meta(description="with generate or turns: folder shared with the serving-guard of this host")
    ] = ""
    warm_mib: Annotated[
        int,
        Meta(
            ge=0,
            description="with turns: host memory, MiB, for the states of all trainers of this host that have not their "
            "turn; others lie on disk; 0 stands for half of the host's memory",
        ),
    ] = 0
    warm_dir: Annotated[
        str,
        Meta(
            description="with turns: folder in memory for those states, this user's own and the same for all trainers "
            "of the host; by default one in /dev/shm"
        ),
    ] = ""
    cold_dir: Annotated[
        str, Meta(description="with turns: folder on a local disk for states beyond warm_mib; by default in /var/tmp")
    ] = ""
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

    def check_device(self) -> None:
        """Raises `InvalidRequest` naming the setting if the device can be neither lent nor shared as they say."""
        if self.generate and self.turns:
            text = "a device that is lent to engines is not shared in turns; leave this out, or generate"
            raise InvalidRequest(text, field="turns")
        if self.window_s and not self.generate:
            raise InvalidRequest("is for trainers that generate: set generate, or leave it out", field="window_s")
        for name in ("warm_mib", "warm_dir", "cold_dir"):
            if getattr(self, name) and not self.turns:
                raise InvalidRequest("is for trainers that take turns: set turns, or leave it out", field=name)
        if not (self.generate or self.turns):
            if self.grant_dir:
                text = "is for trainers that generate, or take turns: set generate or turns, or leave it out"
                raise InvalidRequest(text, field="grant_dir")
            return
        if not self.grant_dir:
            need = "generate" if self.generate else "take turns"
            text = f"is needed to {need}: name the folder that the serving-guard of this host was given"
            raise InvalidRequest(text, field="grant_dir")
        check_folder(Path(self.grant_dir))
        if self.turns:
            check_folder(self.warm_folder(), field="warm_dir")
            check_folder(self.cold_folder(), field="cold_dir")

    def warm_folder(self) -> Path:
        return Path(self.warm_dir or f"{_IN_MEMORY}/ebbtide-{os.geteuid()}")

    def cold_folder(self) -> Path:
        return Path(self.cold_dir or f"{_ON_DISK}/ebbtide-{os.geteuid()}")


def check_wandb(project: str) -> None:
    """Raises `InvalidRequest` if a project is given and the client of Weights & Biases is not installed."""
    if project and find_spec("wandb") is None:
        text = "needs the client of Weights & Biases: pip install 'ebbtide[wandb]', or leave it out"
        raise InvalidRequest(text, field="wandb_project")
