"""How long a request waits for room at the coordinator, and which runs are known."""

from collections.abc import Sequence
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from ebbtide.auth.role_tokens import mint, run_of_token
from ebbtide.auth.roles import Role
from ebbtide.errors import NoCapacity, NotFound, PermissionDenied, RateLimited
from ebbtide.gateway import request_player
from ebbtide.gateway.prompt_threads import PromptThreads
from ebbtide.gateway.request import IdsPrompt, TextRequest
from ebbtide.gateway.request_player import PlayedRequest
from ebbtide.gateway.runs import RunCatalog
from ebbtide.types.rollout import RolloutRequest
from ebbtide.types.run import Run, Sampling
from ebbtide.types.session import MeteredKey
from tests.fakes.scripted_rollouts import scripted_run


class FullLease:
    """Has room at the `room_at`th submit."""

    def __init__(self, room_at: int) -> None:
        self.room_at, self.submits = room_at, 0

    async def submit_rollouts(
        self, rollouts: Sequence[RolloutRequest], *, wait: bool, key: MeteredKey | None = None
    ) -> None:
        assert not wait
        self.submits += 1
        if self.submits < self.room_at:
            raise NoCapacity("full", retry_after_s=0.001)


async def submit(lease: Any) -> None:
    lease.run = scripted_run()
    request = TextRequest(prompts=[IdsPrompt([1])], sampling=Sampling())
    await PlayedRequest(lease, PromptThreads(), request, [], [], [], "owner").submit()


async def test_a_submit_waits_for_room() -> None:
    lease = FullLease(room_at=3)
    await submit(lease)
    assert lease.submits == 3


class LimitedLease(FullLease):
    async def submit_rollouts(
        self, rollouts: Sequence[RolloutRequest], *, wait: bool, key: MeteredKey | None = None
    ) -> None:
        self.submits += 1
        raise RateLimited("slow down", retry_after_s=0.001)


async def test_a_key_at_a_limit_is_told_at_once() -> None:
    lease = LimitedLease(room_at=0)
    with pytest.raises(RateLimited):
        await submit(lease)
    assert lease.submits == 1


async def test_a_submit_that_finds_no_room_tells_when_to_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_player, "_ROOM_S", 0.02)
    with pytest.raises(NoCapacity) as refused:
        await submit(FullLease(room_at=1 << 30))
    assert refused.value.retry_after_s == 0.001


class BoundClient:
    """The SDK under a token of one run: it may not list runs."""

    def __init__(self, *run_ids: str) -> None:
        self._known = {run_id: scripted_run(run_id) for run_id in run_ids}

    async def runs(self) -> list[Run]:
        raise PermissionDenied("the token is for one run, and the call names none")

    async def run(self, run_id: str) -> Run:
        if run_id not in self._known:
            raise NotFound("there is no such run")
        return self._known[run_id]


@pytest.mark.parametrize(("there", "found"), [(["r-1"], ["r-1"]), ([], [])])
async def test_a_gateway_whose_token_is_for_one_run_knows_this_run_alone(there: list[str], found: list[str]) -> None:
    own = mint(Ed25519PrivateKey.generate(), Role.GATEWAY, ttl_s=60, run_id="r-1")
    unused: Any = None
    client: Any = BoundClient(*there)
    catalog = RunCatalog(
        client,
        unused,
        unused,
        holder="g",
        model_roots=("/",),
        max_model_len=0,
        bound_run=lambda: run_of_token(f"Bearer {own}"),
    )
    assert [run.run_id for run in await catalog.runs()] == found
    assert run_of_token("Bearer a-shared-secret") == ""
