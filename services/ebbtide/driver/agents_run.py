"""Drives a run whose episodes agents play through gateways: there is nothing to submit, and its end to be seen to."""

import asyncio

from ebbtide.claimed_runs.run_loop import RunFollower
from ebbtide.client import Lease
from ebbtide.errors import NotReady
from ebbtide.rpc.backoff import pauses
from ebbtide.telemetry import get_logger

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
