"""Trains a run with the trainer that it names: the built-in one, or the user's own."""

import asyncio
import importlib
from typing import TYPE_CHECKING, Any

from ebbtide.client import Client, Lease
from ebbtide.errors import InvalidRequest, PermissionDenied
from ebbtide.run_settings import check_listed, check_permitted
from ebbtide.telemetry import get_logger
from ebbtide.trainer.settings import TrainerSettings
from ebbtide.types.ids import new_fence
from ebbtide.types.run import GRPO, RunEvent, RunSpec

if TYPE_CHECKING:
    from ebbtide.trainer.lending.shared_loan import LendingRanks
    from ebbtide.trainer.ranks.rank_group import RankGroup

log = get_logger(__name__)


async def train(
    client: Client,
    lease: Lease,
    settings: TrainerSettings,
    crew: "RankGroup | None" = None,
    lending: "LendingRanks | None" = None,
) -> None:
    """Trains the lease's run, on `crew`'s ranks if given; `lending`: those on other hosts lend too. Raises
    `InvalidRequest` or `RunFailed` for a faulty run."""
    name = lease.run.spec.trainer.name
    if lease.run.spec.external:
        raise PermissionDenied(f"run {lease.run_id} brings its own trainer; give another run_id, or none")
    await asyncio.to_thread(check_trainable, lease.run.spec, settings)
    if not lease.run.spec.built_in:
        await load_trainer(name)(client, lease, lease.run)
        await lease.lost.wait()  # the trainer is done; the run ends when its driver is
        return
    from ebbtide.trainer.training import train_run

    await _warn_of_memory(lease, settings, crew)
    await train_run(client, lease, settings, crew, lending)


async def _warn_of_memory(lease: Lease, settings: TrainerSettings, crew: "RankGroup | None") -> None:
    """Reports a warning if the run will hardly fit into the GPUs. Raises `InvalidRequest` if it cannot."""
    from ebbtide.trainer.memory_estimate import check_memory

    ranks, spec = crew.world.size if crew is not None else 1, lease.run.spec
    warning = await asyncio.to_thread(check_memory, spec, settings, ranks=ranks, longest=spec.sampling.max_tokens)
    if warning:
        log.warning("the run will hardly fit", reason=warning)
        await lease.report([RunEvent(kind="warning", key=new_fence(), message=warning)])


def check_trainable(spec: RunSpec, settings: TrainerSettings) -> None:
    """Raises `InvalidRequest` naming the spec's field and the setting for what the settings do not allow."""
    check_permitted(spec, settings)
    if settings.generate and not settings.window_s and spec.trainer.streaming and spec.tail.rounds != "off":
        text = (
            "no window of a trainer that generates is planned for steps that train the groups that are whole first; "
            "leave it or trainer.streaming out, or set window_s of the trainer"
        )
        raise InvalidRequest(text, field="tail.rounds")
    if spec.takes_turns and not settings.turns:
        text = (
            'is "turns", and this trainer has its device alone; leave it out, or start the trainer with turns and the '
            "grant_dir of a serving-guard with owner = turns"
        )
        raise InvalidRequest(text, field="sharing.devices")
    if settings.turns and not spec.built_in:
        text = (
            f'only the built-in trainer takes turns, as this one must; set it to "{GRPO}", or start one without turns'
        )
        raise InvalidRequest(text, field="trainer.name")
    setting = "allowed_trainers (EBBTIDE_ALLOWED_TRAINERS) of the trainer"
    check_listed(spec.trainer.name, settings.allowed_trainers, field="trainer.name", setting=setting)


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
