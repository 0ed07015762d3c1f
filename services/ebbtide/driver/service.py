"""Drives one run, after a check of what it names, its environment and its tokens.

In a run whose episodes agents play through gateways there is nothing to submit, and only its end to be seen to.
"""

import asyncio
from collections.abc import Sequence
from functools import partial

import msgspec

from ebbtide.client import Client, Lease
from ebbtide.driver.coordinator_traffic import CoordinatorTraffic
from ebbtide.driver.environment_host import HostPlan
from ebbtide.driver.environment_processes import EnvironmentProcesses
from ebbtide.driver.environments import LOADING_S, Environments, EpisodeClock, ThreadedEnvironments
from ebbtide.driver.episode_player import EpisodePlayer
from ebbtide.driver.host_process import TookTooLong, host_plan
from ebbtide.driver.settings import DriverSettings
from ebbtide.driver.steps import StepSubmitter
from ebbtide.driver.verdicts import SessionVerdicts, VerifierProcesses
from ebbtide.environments import DATASET, EnvironmentSource, load_source, needs_isolation
from ebbtide.environments.dataset import dataset_params, with_local_rows
from ebbtide.errors import InvalidRequest, NotReady
from ebbtide.rpc.backoff import pauses
from ebbtide.run_client import Conversations, RunFailed, RunFollower, load_conversations
from ebbtide.run_settings import check_permitted
from ebbtide.runtime import race
from ebbtide.telemetry import get_logger
from ebbtide.types.run import RunSpec

log = get_logger(__name__)


async def end_agents_run(lease: Lease, following: RunFollower) -> None:
    """Ends the run once the trainer has trained its last step, and committed all sessions. `following` must follow it.

    Sessions that end later find the run ended.
    """
    steps = lease.run.spec.trainer.steps
    await following.catch_up(lease)
    await following.until(lambda: steps in following.checkpoints)
    for pause in pauses(first_s=0.05, cap_s=1.0):
        try:
            await lease.finish()
        except NotReady:  # a session ended meanwhile, and the trainer is about to drop it
            await asyncio.sleep(pause)
        else:
            log.info("the run of agents has ended", run_id=lease.run_id)
            return


async def drive(client: Client, lease: Lease, settings: DriverSettings) -> None:
    """Drives the lease's run to its end. Raises `InvalidRequest` or `RunFailed` if the run is at fault."""
    spec = lease.run.spec
    await asyncio.to_thread(check_permitted, spec, settings)
    following = RunFollower(client, lease.run_id)
    if spec.from_agents:
        await _drive_agents(lease, following, settings)
        return
    _check_scoring(spec, settings)
    spec = await _with_local_rows(spec)
    environments = _environments(spec, settings)
    exchange = CoordinatorTraffic(lease, lambda request: request.priority <= max(following.versions, default=0))
    try:
        player = EpisodePlayer(spec, environments, await _prepare(spec, environments), exchange)
        await race(following.run(), exchange.run(), StepSubmitter(lease, player, exchange, following).run())
    finally:
        await environments.close()


async def _drive_agents(lease: Lease, following: RunFollower, settings: DriverSettings) -> None:
    """Verifies the sessions of a run of agents, if it has verifiers, and ends the run after its last step."""
    spec = lease.run.spec
    if not spec.environment.verifiers:
        await race(following.run(), end_agents_run(lease, following))
        return
    conversations = await _conversations(spec.model)
    processes = VerifierProcesses(spec.environment.verifiers, settings, host_plan(settings))
    try:
        await processes.load()
        verdicts = SessionVerdicts(lease, processes, conversations, limit_s=spec.batch.episode_timeout_s)
        await race(following.run(), end_agents_run(lease, following), verdicts.run())
    finally:
        await processes.close()


def _check_scoring(spec: RunSpec, settings: DriverSettings) -> None:
    """Refuses a limit that nothing would keep: threads cannot be cut, and steps' processes know the episode's alone."""
    if spec.tail.reward_timeout_s is None:
        return
    if not needs_isolation(spec.environment.name, spec.environment.params):
        text = f"{spec.environment.name!r} is scored in threads of the driver, which cannot be cut; leave it out"
    elif not settings.scoring_processes:
        text = "this driver scores nothing apart; set its scoring_processes to 1 at least, or leave it out"
    else:
        return
    raise InvalidRequest(text, field="tail.reward_timeout_s")


async def _with_local_rows(spec: RunSpec) -> RunSpec:
    """Fetches the rows of a data set, with the rights that code of the run has not. Raises `InvalidRequest` or
    `RunFailed`."""
    if spec.environment.name != DATASET:
        return spec
    try:
        async with asyncio.timeout(LOADING_S):
            params = await asyncio.to_thread(with_local_rows, spec.environment.params)
    except TimeoutError:
        raise RunFailed(f"the rows of {spec.environment.params['data']!r} were not there in {LOADING_S:g} s") from None
    return msgspec.structs.replace(spec, environment=msgspec.structs.replace(spec.environment, params=params))


def _environments(spec: RunSpec, settings: DriverSettings) -> Environments:
    """Ebbtide's own environments run in this process, all others in processes without its rights."""
    if needs_isolation(spec.environment.name, spec.environment.params):
        return EnvironmentProcesses(spec, settings, environment_plan(spec, settings))
    return ThreadedEnvironments(partial(_load_source, spec), settings.environment_threads)


def environment_plan(spec: RunSpec, settings: DriverSettings) -> HostPlan:
    """Shows processes the run's rows, besides what all of them are shown."""
    plan = host_plan(settings)
    if spec.environment.name != DATASET:
        return plan
    files = dataset_params(spec.environment.params).place.files().values()
    return msgspec.structs.replace(plan, readable=(*plan.readable, *map(str, files)))


async def _prepare(spec: RunSpec, environments: Environments) -> Conversations:
    """Loads the run's tokenizer and environments. Raises `InvalidRequest` or `RunFailed` if the run is at fault."""
    conversations = await _conversations(spec.model, spec.sampling.stop_token_ids)
    try:
        await environments.load()
    except TookTooLong:
        raise RunFailed(f"environment {spec.environment.name!r} was not ready in {LOADING_S:g} s") from None
    try:
        await _try_out(spec, environments, conversations)
    except (InvalidRequest, RunFailed):
        raise
    except Exception as error:  # noqa: BLE001 - user code; it fails single episodes
        log.warning("the environment failed when tried out", reason=f"{type(error).__name__}: {error}")
    return conversations


async def _conversations(model: str, stop_token_ids: Sequence[int] = ()) -> Conversations:
    try:
        async with asyncio.timeout(LOADING_S):
            return await asyncio.to_thread(load_conversations, model, stop_token_ids=stop_token_ids)
    except TimeoutError:
        raise RunFailed(f"the tokenizer of {model!r} was not there in {LOADING_S:g} s") from None


def _load_source(spec: RunSpec) -> EnvironmentSource:
    try:
        return load_source(spec.environment.name, spec.environment.params, spec.seed)
    except InvalidRequest:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise RunFailed(f"environment {spec.environment.name!r} cannot be made: {reason}") from error


async def _try_out(spec: RunSpec, environments: Environments, conversations: Conversations) -> None:
    """Makes the last problem of evaluation, and the first prompt."""
    clock, problems = EpisodeClock(spec.batch.episode_timeout_s), spec.evaluation.problems
    last = environments.episode("eval", problems - 1)
    first = environments.episode("train", 0)
    try:
        if problems:
            await last.reset(clock)
        conversations.opening(await first.reset(clock))
    finally:
        last.close()
        first.close()
