"""Several coordinators in one setting, and which of them calls go to, as they say by their health."""

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from ebbtide.auth.security import ClientSecurity, ServerSettings
from ebbtide.errors import InvalidRequest, StandingBy, Unavailable
from ebbtide.rpc.leader_channel import LeaderChannel, addresses
from ebbtide.rpc.server import Server
from ebbtide.v1 import runs_pb2, runs_pb2_grpc
from tests.support.waiting import wait_until

SECURITY = ClientSecurity(token="t")
SERVICE = "ebbtide.v1.Runs"


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("a:1,", "lacks an address beside a comma"),
        (",", "lacks an address beside a comma"),
        ("a:1,b", "'b' is no address: give host:port or unix:path"),
        ("a:1,b:70000", "'b:70000' is no address"),
        ("http://a:1,b:1", "'http://a:1' is no address"),
        ("a:1, a:1", "names a:1 twice"),
    ],
)
def test_bad_addresses_are_refused_by_name(text: str, what: str) -> None:
    with pytest.raises(InvalidRequest, match=what) as caught:
        addresses(text)
    assert caught.value.field == "coordinator"


def test_addresses_keep_their_order() -> None:
    assert addresses("b:2, a:1,unix:/c") == ("b:2", "a:1", "unix:/c")


def test_a_service_of_one_address_refuses_several() -> None:
    from ebbtide.rpc.channel import check_address

    with pytest.raises(InvalidRequest, match="is no address"):
        check_address("a:1,b:2", field="relay")


class Coordinator(runs_pb2_grpc.RunsServicer):
    """Answers with its name, or never."""

    def __init__(self, name: str) -> None:
        self.name, self.asked = name, 0
        self.answers = asyncio.Event()
        self.answers.set()
        self.server = Server(
            ServerSettings(listen="127.0.0.1:0", token="t"), [(runs_pb2_grpc.add_RunsServicer_to_server, self, SERVICE)]
        )

    async def GetRun(self, request: runs_pb2.GetRunRequest, context: object) -> runs_pb2.Run:
        self.asked += 1
        await self.answers.wait()
        return runs_pb2.Run(run_id=self.name)

    async def leads(self) -> None:
        self.server.closed = None
        await self.server.set_serving(True)

    async def stands_by(self) -> None:
        self.server.closed = StandingBy("it stands by")
        await self.server.set_serving(False)


@pytest.fixture
async def two() -> AsyncIterator[tuple[Coordinator, Coordinator]]:
    """The first leads."""
    made = Coordinator("a"), Coordinator("b")  # type: ignore[abstract]
    for one in made:
        await one.server.start()
        await one.stands_by()
    await made[0].leads()
    yield made
    for one in made:
        one.answers.set()
        await one.server.stop(0.0)


@pytest.fixture
async def heads(two: tuple[Coordinator, Coordinator]) -> AsyncIterator[LeaderChannel]:
    async with LeaderChannel(",".join(one.server.address for one in two), SECURITY) as made:
        yield made


async def ask(heads: LeaderChannel) -> str:
    with heads.translated():
        found: runs_pb2.Run = await runs_pb2_grpc.RunsStub(heads).GetRun(runs_pb2.GetRunRequest(), timeout=30)
    return found.run_id


async def ask_on(heads: LeaderChannel) -> str:
    while True:
        try:
            return await ask(heads)
        except Unavailable:
            await heads.pause(0.2)


async def test_calls_go_to_the_one_that_begins_to_lead(
    two: tuple[Coordinator, Coordinator], heads: LeaderChannel
) -> None:
    assert await ask_on(heads) == "a"
    await two[0].stands_by()
    await two[1].leads()
    await wait_until(lambda: heads.target == two[1].server.address)
    assert await ask_on(heads) == "b"
    assert two[0].asked == 1


async def test_the_first_that_stands_by_is_passed_over(two: tuple[Coordinator, Coordinator]) -> None:
    async with LeaderChannel(f"{two[1].server.address},{two[0].server.address}", SECURITY) as heads:
        assert await asyncio.wait_for(ask_on(heads), 10) == "a"


async def test_a_call_that_the_former_leader_never_answers_ends_when_another_leads(
    two: tuple[Coordinator, Coordinator], heads: LeaderChannel
) -> None:
    assert await ask_on(heads) == "a"
    two[0].answers.clear()  # frozen, for all that can be seen: it says nothing any more, and that it leads neither
    call = asyncio.create_task(ask(heads))
    await wait_until(lambda: two[0].asked == 2)
    await two[1].leads()
    with pytest.raises(Unavailable, match=f"{two[0].server.address} no longer leads; {two[1].server.address} does"):
        await asyncio.wait_for(call, 10)
    assert await ask_on(heads) == "b"


async def test_a_call_ends_as_unavailable_though_its_leader_leads_again_when_it_is_read(
    two: tuple[Coordinator, Coordinator], heads: LeaderChannel
) -> None:
    assert await ask_on(heads) == "a"
    two[0].answers.clear()

    async def ask_and_read_late() -> None:
        with heads.translated():
            call = runs_pb2_grpc.RunsStub(heads).GetRun(runs_pb2.GetRunRequest(), timeout=30)
            await wait_until(lambda: two[0].asked == 2)
            for former, leader in (two, two[::-1]):
                await former.stands_by()
                await leader.leads()
                await wait_until(lambda leader=leader: heads.target == leader.server.address)  # type: ignore[misc]
            await call

    with pytest.raises(Unavailable, match=f"{two[0].server.address} ceased to lead for a while"):
        await ask_and_read_late()


async def test_who_is_cancelled_is_not_told_that_another_leads(
    two: tuple[Coordinator, Coordinator], heads: LeaderChannel
) -> None:
    two[0].answers.clear()
    call = asyncio.create_task(ask(heads))
    await wait_until(lambda: two[0].asked == 1)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call


async def test_a_pause_ends_when_somebody_begins_to_lead(
    two: tuple[Coordinator, Coordinator], heads: LeaderChannel
) -> None:
    await two[0].stands_by()
    with pytest.raises(StandingBy):
        await ask(heads)
    pause = asyncio.create_task(heads.pause(60))
    await asyncio.sleep(0)
    await two[1].leads()
    await asyncio.wait_for(pause, 10)


async def test_one_that_wakes_and_still_says_that_it_leads_is_not_followed(
    two: tuple[Coordinator, Coordinator], heads: LeaderChannel
) -> None:
    """Its stream had broken, so that what it says is not known to be news."""
    assert await ask_on(heads) == "a"
    await two[1].leads()
    await two[0].stands_by()  # else it would be followed where the other was not heard before
    await wait_until(lambda: heads.target == two[1].server.address)
    address = two[0].server.address
    await two[0].server.stop(0.0)
    again = Coordinator("a again")  # type: ignore[abstract]
    again.server = Server(
        ServerSettings(listen=address, token="t"), [(runs_pb2_grpc.add_RunsServicer_to_server, again, SERVICE)]
    )
    await again.server.start()
    await again.leads()
    await wait_until(lambda: again.server.address in heads.serving, timeout=10)
    assert await ask(heads) == "b"
    await two[1].stands_by()
    await wait_until(lambda: heads.target == address)
    await again.server.stop(0.0)


async def test_another_service_among_the_addresses_is_named_in_the_log(
    two: tuple[Coordinator, Coordinator], caplog: pytest.LogCaptureFixture
) -> None:
    server = grpc.aio.server()
    health_pb2_grpc.add_HealthServicer_to_server(health.aio.HealthServicer(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with LeaderChannel(f"{two[0].server.address},127.0.0.1:{port}", SECURITY) as heads:
        assert await ask_on(heads) == "a"
        await wait_until(lambda: f"the service at 127.0.0.1:{port} is no coordinator" in caplog.text)
    await server.stop(0.0)


def test_health_has_the_bytes_that_the_wrappers_make() -> None:
    from google.protobuf.wrappers_pb2 import Int32Value, StringValue

    asked = health_pb2.HealthCheckRequest(service=SERVICE).SerializeToString()
    assert StringValue(value=SERVICE).SerializeToString() == asked
    for status in (1, 2, 3):
        said = health_pb2.HealthCheckResponse(status=status)
        assert Int32Value.FromString(said.SerializeToString()).value == status
