"""The profile coserving: a served model under traffic, a worker that has its idle time, and a guard that is killed."""

import asyncio
import json
from typing import Any, Final

import msgspec

from ebbtide.client import Client
from ebbtide.demo.coserving.steady_users import UsersAccount
from ebbtide.types.fleet import WorkerKind
from ebbtide.types.run import Run
from tests.compose import scene
from tests.compose.podman import Failed, Podman
from tests.support.waiting import wait_until

PROFILE: Final = ("coserving",)
#: Users come when the guard says that the engine answers.
LENDING: Final = ("serving-engine", "serving-pids", "serving-guard", "worker-borrowed")
SERVICES: Final = (*LENDING, "traffic")
SHARING: Final = ("serving-guard", "worker-borrowed")
#: What either may open of the secrets of those whose processes it sees: of the worker, what any worker has.
_OPEN: Final = {"/secrets/cluster/token"}
#: Two or three are done when the guard is killed, and each of the others makes some thousand tokens.
_STEPS: Final = 8
_LOOK_S: Final = 1.0
_BOOT_S: Final = 600.0
_RUN_S: Final = 900.0
#: Tokens in rollout steps beside users, before and after the guard is killed.
_HARVEST: Final = 500


async def borrow(podman: Podman, client: Client, tell: scene.Tell) -> Run:
    """Train a run on tokens that a borrowed worker alone makes, kill the guard's process meanwhile, and judge what
    users got. The plain workers have left. Raises `Failed`."""
    await _borrower_attached(client)
    run = await client.submit(scene.shorter(_STEPS, "borrowed"), "borrowed")
    await _harvested(podman, client, run.run_id, tell)
    await scene.crash(podman, "serving-guard")
    tell("killed the guard's process; its restart policy brought it back")
    await _harvested(podman, client, run.run_id, tell)
    scene.check_containers(podman, SERVICES, sharing=SHARING, pids="serving-pids")
    for service in SHARING:
        _check_sight(podman, service)
    async with asyncio.timeout(_RUN_S):
        async for _ in client.watch(run.run_id):
            pass
    _judged(_status(podman), tell)
    _served(podman, tell)
    return await client.run(run.run_id)


def _check_sight(podman: Podman, service: str) -> None:
    """Raises `Failed` if a container may open secrets by the processes that it sees which none of the two needs."""
    look = "ls -d /proc/[0-9]*/root/secrets/*/* | sed 's,.*/root,,' | sort -u"
    found = set(podman("exec", podman.container(service), "sh", "-c", look).split())
    if found != _OPEN:
        raise Failed(f"{service} may open {sorted(found)}, and should {sorted(_OPEN)}")


async def _borrower_attached(client: Client) -> None:
    async def attached() -> bool:
        return any(worker.kind is WorkerKind.BORROWED for worker in await client.workers())

    await wait_until(attached, _BOOT_S, interval=_LOOK_S, what="the borrowed worker attached")


async def _harvested(podman: Podman, client: Client, run_id: str, tell: scene.Tell) -> None:
    """Until the present guard has seen requests, and lent for some tokens. Raises `Failed` if the run ends before."""
    seen: dict[str, Any] = {}

    async def lent() -> bool:
        over = (await client.run(run_id)).status.ended
        try:
            seen.update(_status(podman))
        except Failed:  # it boots
            return False
        tokens: int = sum(one["tokens_harvested"] for one in seen["borrowers"])
        if over and tokens <= _HARVEST:
            raise Failed(f"the run ended when this guard had lent for {tokens} tokens")
        return bool(seen["requests"]) and tokens > _HARVEST

    await wait_until(lent, _BOOT_S, interval=_LOOK_S, what="tokens in the idle time of the served model")
    tokens = sum(one["tokens_harvested"] for one in seen["borrowers"])
    tell(f"the guard's screen: {seen['requests']} requests, {tokens} tokens harvested")


def _status(podman: Podman) -> dict[str, Any]:
    """What the guard's screen shows, by one command."""
    printed = scene.command_line(podman, "guard", "status", "--json", profiles=PROFILE)
    found: dict[str, Any] = json.loads(printed[printed.index("{") :])
    return found


def _judged(status: dict[str, Any], tell: scene.Tell) -> None:
    """Raises `Failed` unless the guard has targets and has judged requests by them."""
    for name in ("ttft", "tpot"):
        one = status[name]
        if not one["target"] or not 0 <= one["attained"] <= 1:
            raise Failed(f"the guard has not judged {name}: {one}")
        tell(
            f"{name}: p99 {1e3 * one['p99']:.1f} ms, target {1e3 * one['target']:.1f} ms, attained by "
            f"{one['attained']:.1%}; unloaded {1e3 * one['unloaded']:.1f} ms"
        )


def _served(podman: Podman, tell: scene.Tell) -> None:
    """Raises `Failed` unless all that users sent was served, also what was under way as the guard was killed."""
    name = podman.container("traffic")
    podman("stop", "--time", "60", name, timeout_s=90)
    told = [line for line in podman.logs(name).splitlines() if line.startswith("{")]
    account = msgspec.json.decode(told[-1], type=UsersAccount)
    if not account.sent or account.ended != account.sent:
        raise Failed(f"of {account.sent} requests {account.ended} ended")
    tell(
        f"users: {account.sent} requests, all of which ended; {account.again} were sent again; TTFT p50 "
        f"{account.ttft_p50_ms:.0f} ms, p99 {account.ttft_p99_ms:.0f} ms"
    )
