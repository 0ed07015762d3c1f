"""Trains a run with the trainer that it names: the built-in one, or the user's own."""

import asyncio
import importlib
from typing import TYPE_CHECKING, Any

from ebbtide.client import Client, Lease
from ebbtide.errors import InvalidRequest, PermissionDenied
from ebbtide.trainer.settings import TrainerSettings

if TYPE_CHECKING:
    from ebbtide.trainer.ranks.rank_group import RankGroup

GRPO = "grpo"


async def train(client: Client, lease: Lease, settings: TrainerSettings, crew: "RankGroup | None" = None) -> None:
    """Trains the lease's run, on `crew`'s ranks if given. Raises `InvalidRequest` or `RunFailed` for a faulty run."""
    name = lease.run.spec.trainer.name
    if lease.run.spec.external:
        raise PermissionDenied(f"run {lease.run_id} brings its own trainer; give another run_id, or none")
    if name != GRPO:
        await load_trainer(name)(client, lease, lease.run)
        await lease.lost.wait()  # the trainer is done; the run ends when its driver is
        return
    from ebbtide.trainer.training import train_run

    await train_run(client, lease, settings, crew)


def load_trainer(name: str) -> Any:
    """Imports the coroutine function `package.module:function` of (client, lease, run)."""
    module, _, attribute = name.partition(":")
    try:
        function = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise InvalidRequest(
            f"cannot import {name!r} ({error}); take {GRPO!r}, or install that package where the trainer runs",
            field="trainer.name",
        ) from error
    if not asyncio.iscoroutinefunction(function):
        raise InvalidRequest(f"{name!r} must be an async function of (client, lease, run)", field="trainer.name")
    return function
