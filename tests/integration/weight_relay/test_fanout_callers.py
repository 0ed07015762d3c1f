"""Readers are sent to workers and relays alone: whom they open sees their tokens."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Protocol

import pytest

from ebbtide.auth.role_tokens import mint, signing_key
from ebbtide.auth.roles import AMONG_PEERS, Role
from ebbtide.auth.security import ClientSecurity
from ebbtide.cli.credentials import signing_keys
from ebbtide.errors import PermissionDenied
from ebbtide.rpc.channel import open_channel
from ebbtide.rpc.status_table import translated
from ebbtide.v1 import weights_pb2 as pb
from ebbtide.v1.weights_pb2_grpc import WeightsStub
from ebbtide.weight_relay.source_ranking import SEVERAL
from tests.integration.weight_relay.fanout import RunningRelay, Version, running

STRANGERS = [(Role.USER, "run"), (Role.TRAINER, "run"), (Role.USER, ""), (Role.OPERATOR, "")]


class Callers(Protocol):
    def __call__(self, role: Role, run_id: str = "") -> WeightsStub: ...


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    return signing_keys.make(tmp_path / "keys")


@pytest.fixture
async def home(tmp_path: Path, keys: Path) -> AsyncIterator[RunningRelay]:
    async with running(tmp_path / "home", token_keys=str(keys)) as relay:
        await Version(1, tiles=1).publish(relay.relay)
        yield relay


@pytest.fixture
async def caller(home: RunningRelay, keys: Path) -> AsyncIterator[Callers]:
    signer = signing_key((keys.parent / "tokens.key").read_bytes(), field="key")
    async with AsyncExitStack() as stack:
        channels = []

        def connect(role: Role, run_id: str = "") -> WeightsStub:
            token = mint(signer, role, ttl_s=600.0, run_id=run_id)
            channels.append(open_channel(home.address, ClientSecurity(token=token)))
            stack.push_async_callback(channels[-1].close)
            return WeightsStub(channels[-1])

        yield connect


def asked(name: str, *, address: str = "", done: bool = False, failed: tuple[str, ...] = ()) -> pb.FindWayRequest:
    holder = pb.Holder(name=name, site="a", host="a", address=address)
    return pb.FindWayRequest(run_id="run", policy="policy", version=1, holder=holder, done=done, failed=failed)


async def sources(stub: WeightsStub, request: pb.FindWayRequest) -> list[str]:
    with translated("weight-relay"):
        return [source.address for source in (await stub.FindWay(request)).sources]


@pytest.mark.parametrize(("role", "run_id"), STRANGERS)
async def test_no_reader_is_sent_to_an_address_that_another_than_a_worker_or_a_relay_names(
    caller: Callers, role: Role, run_id: str
) -> None:
    stranger, worker = caller(role, run_id), caller(Role.WORKER)
    for done in (True, False):
        with pytest.raises(PermissionDenied, match=r"holder\.address: .*leave it empty"):
            await sources(stranger, asked("evil", address="evil:443", done=done))
    assert await sources(worker, asked("w0", address="w0:1")) == [""]
    assert await sources(stranger, asked("sdk")) == ["w0:1"]


@pytest.mark.parametrize("role", sorted(AMONG_PEERS))
async def test_readers_are_sent_to_workers_and_relays(caller: Callers, role: Role) -> None:
    await sources(caller(role), asked("first", address="first:1", done=True))
    assert await sources(caller(Role.WORKER), asked("w1", address="w1:1")) == ["first:1"]


async def test_who_shows_the_shared_secret_may_serve_too(home: RunningRelay) -> None:
    await home.find("w0", 1, site="a", address="w0:1", done=True)
    assert await home.find("w1", 1, site="a") == ["w0:1"]


@pytest.mark.parametrize(("role", "run_id"), STRANGERS)
async def test_what_fails_a_caller_under_invented_names_keeps_no_reader_from_it(
    caller: Callers, role: Role, run_id: str
) -> None:
    stranger, worker = caller(role, run_id), caller(Role.WORKER)
    await sources(worker, asked("w0", address="w0:1", done=True))
    for number in range(SEVERAL):
        assert await sources(stranger, asked(f"invented-{number}", failed=("w0:1",))) == [""]  # its own answer
    await sources(stranger, asked("w1", failed=("w0:1",)))
    assert await sources(worker, asked("w1", address="w1:1")) == ["w0:1"]


async def test_what_fails_several_workers_is_named_to_none(caller: Callers) -> None:
    worker = caller(Role.WORKER)
    await sources(worker, asked("w0", address="w0:1", done=True))
    for number in range(SEVERAL):
        await sources(worker, asked(f"reader-{number}", failed=("w0:1",)))
    assert await sources(worker, asked("w1", address="w1:1")) == [""]
