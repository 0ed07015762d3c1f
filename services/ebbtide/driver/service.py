"""Drives one run, after a check of its environment and tokens."""

import asyncio
from functools import partial
from typing import Final

from ebbtide.claimed_runs.conversation import Conversations, load_conversations
from ebbtide.claimed_runs.run_failure import RunFailed
from ebbtide.claimed_runs.run_follower import RunFollower
from ebbtide.client import Client, Lease
from ebbtide.driver.coordinator_traffic import CoordinatorTraffic
from ebbtide.driver.environment_threads import EnvironmentThreads, TookTooLong
from ebbtide.driver.episode_player import EpisodePlayer
from ebbtide.driver.settings import DriverSettings
from ebbtide.driver.step_submitter import StepSubmitter
from ebbtide.environments import EnvironmentSource, load_source
from ebbtide.errors import InvalidRequest
from ebbtide.runtime import race
from ebbtide.telemetry import get_logger
from ebbtide.types.run import RunSpec

log = get_logger(__name__)

#: Loading an environment's data may take minutes; longer means that it hangs.
_LOADING_S: Final = 600.0


async def drive(client: Client, lease: Lease, settings: DriverSettings) -> None:
    """Drives the lease's run to its end. Raises `InvalidRequest` or `RunFailed` if the run is at fault."""
    spec, sandbox = lease.run.spec, EnvironmentThreads(settings.environment_threads)
    following = RunFollower(client, lease.run_id)
    exchange = CoordinatorTraffic(lease, lambda request: request.priority <= max(following.versions, default=0))
    try:
        source, conversations = await _prepare(spec, sandbox)
        player = EpisodePlayer(spec, source, conversations, sandbox, exchange)
        await race(following.run(), exchange.run(), StepSubmitter(lease, player, exchange, following).run())
    finally:
        sandbox.close()


async def _prepare(spec: RunSpec, sandbox: EnvironmentThreads) -> tuple[EnvironmentSource, Conversations]:
    """Loads the run's environments and tokenizer. Raises `InvalidRequest` or `RunFailed` if the run is at fault."""
    tokens = partial(load_conversations, spec.model, stop_token_ids=spec.sampling.stop_token_ids)
    conversations = await asyncio.to_thread(tokens)
    try:
        source = await sandbox.call(partial(_load_source, spec), timeout_s=_LOADING_S)
    except TookTooLong:
        raise RunFailed(f"environment {spec.environment.name!r} was not ready in {_LOADING_S:g} s") from None
    try:
        attempt = partial(_try_out, spec, source, conversations)
        await sandbox.call(attempt, timeout_s=spec.batch.episode_timeout_s)
    except InvalidRequest:
        raise
    except Exception as error:  # noqa: BLE001 - user code; it fails single episodes
        log.warning("the environment failed when tried out", reason=f"{type(error).__name__}: {error}")
    return source, conversations


def _load_source(spec: RunSpec) -> EnvironmentSource:
    try:
        return load_source(spec.environment.name, spec.environment.params, spec.seed)
    except InvalidRequest:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise RunFailed(f"environment {spec.environment.name!r} cannot be made: {reason}") from error


def _try_out(spec: RunSpec, source: EnvironmentSource, conversations: Conversations) -> None:
    """Makes the first prompt, and the last problem of evaluation."""
    if spec.evaluation.problems:
        source.make("eval", spec.evaluation.problems - 1)
    conversations.opening(source.make("train", 0).reset())
