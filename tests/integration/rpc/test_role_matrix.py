"""Every RPC of every service against every wrong token, and every right one, in the clear and over mTLS.

The servicers are those of the real services; what reaches them is noted, so that who is let in is known to be. The
guard's is tried on an address too, though a guard serves it on a socket in a folder that lets nobody else in
(`tests/unit/grants/test_folder.py`).
"""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.descriptor_pool import Default
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from ebbtide.auth.admission import can_name_run
from ebbtide.auth.role_tokens import mint, signing_key
from ebbtide.auth.roles import TABLE, Role
from ebbtide.auth.security import ServerSettings
from ebbtide.cli.credentials import certificates, signing_keys
from tests.integration.rpc.services import Services
from tests.support.redis_servers import EmbeddedRedis

DENIED, UNKNOWN = grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED
#: What gRPC now and then puts over the status of a call in which a write was under way (grpc/grpc#36066).
LOST = grpc.StatusCode.INTERNAL
RUN, OTHER = "run-a", "run-b"
METHODS = sorted(TABLE)
PEER = "worker's peers: /ebbtide.v1.Weights/FetchTiles"


class World:
    """Servers in the clear and with mTLS, of all services and of a worker's; tokens and certificates of all roles."""

    def __init__(self, folder: Path, redis_url: str) -> None:
        self.keys, self.certs = folder / "keys", folder / "certs"
        public = signing_keys.make(self.keys)
        self.signer = signing_key((self.keys / "tokens.key").read_bytes(), field="key")
        self._ca = certificates.init(self.certs, 2)
        for role in Role:
            certificates.issue(self.certs, role, [role], [], 1)
        certificates.issue(self.certs, "server", [Role.COORDINATOR], ["127.0.0.1"], 1)
        (folder / "grants").mkdir(0o700)
        self.services = Services(folder, redis_url)
        self.services.__enter__()
        clear = ServerSettings(token_keys=str(public))
        pem, key = self.certs / "server.pem", self.certs / "server.key"
        mutual = ServerSettings(token_keys=str(public), tls_ca=str(self._ca), tls_cert=str(pem), tls_key=str(key))
        self._addresses = {
            (transport, peer): self.services.serve(settings, peer=peer)
            for transport, settings in (("clear", clear), ("mtls", mutual))
            for peer in (False, True)
        }
        self._channels: dict[Any, grpc.aio.Channel] = {}

    def channel(self, transport: str, certificate: Role | None, *, peer: bool) -> grpc.aio.Channel:
        key = transport, certificate, peer
        if key not in self._channels:
            credentials = None
            if transport == "mtls":
                ends = (".key", ".pem") if certificate else ()
                files = [(self.certs / f"{certificate}{end}").read_bytes() for end in ends]
                credentials = grpc.ssl_channel_credentials(self._ca.read_bytes(), *files)
            self._channels[key] = self.services.connect(self._addresses[transport, peer], credentials)
        return self._channels[key]

    def token(self, role: Role, *, run_id: str = "", ttl_s: float = 600.0, signer: Any = None) -> str:
        return mint(signer or self.signer, role, ttl_s=ttl_s, run_id=run_id)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, redis_server: EmbeddedRedis) -> Iterator[World]:
    made = World(tmp_path_factory.mktemp("roles"), redis_server.url)
    yield made
    made.services.__exit__()


class Rpc:
    """One RPC over one transport."""

    def __init__(self, world: World, transport: str, method: str) -> None:
        self._world, self._transport, self._peer = world, transport, method == PEER
        self.method = method.rpartition(" ")[2]
        service, name = self.method.strip("/").split("/")
        self._descriptor: MethodDescriptor = Default().FindMethodByName(f"{service}.{name}")
        self.allowed = sorted(TABLE[self.method])

    def call(self, token: str | None, *, certificate: Role | None = None, run_id: str = RUN) -> grpc.StatusCode | None:
        """The status of a call about `run_id`, or None once it has reached the servicer."""
        reached = self._world.services.reached
        channel = self._world.channel(self._transport, certificate, peer=self._peer)

        async def ask() -> grpc.StatusCode | None:
            reached.clear()
            call = self._begin(channel, token, about(self._descriptor.input_type, run_id))
            done: asyncio.Future[grpc.StatusCode] = asyncio.ensure_future(call.code())
            while not done.done() and not reached:
                await asyncio.wait({done}, timeout=0.002)
            if not reached:
                return await done
            if self._descriptor.client_streaming:  # the first message is read, and judged, by the servicer
                code = await done
                return None if code not in {DENIED, UNKNOWN, LOST} else code
            call.cancel()
            return None

        found: grpc.StatusCode | None = LOST
        while found is LOST:
            found = self._world.services.run(ask())
        return found

    def _begin(self, channel: grpc.aio.Channel, token: str | None, request: Message) -> Any:
        metadata = (("authorization", f"Bearer {token}"),) if token is not None else ()
        streams = self._descriptor.client_streaming, self._descriptor.server_streaming
        kind = f"{'stream' if streams[0] else 'unary'}_{'stream' if streams[1] else 'unary'}"
        make = getattr(channel, kind)(self.method, request_serializer=lambda message: message.SerializeToString())
        return make(iter([request]) if streams[0] else request, metadata=metadata, timeout=20)


def about(kind: Any, run_id: str) -> Message:
    """A request that names the run in every place there is, and is empty else."""
    made: Message = GetMessageClass(kind)()
    name_run(made, run_id)
    return made


def name_run(message: Message, run_id: str, depth: int = 0) -> None:
    for field in message.DESCRIPTOR.fields:
        if field.name == "run_id":
            setattr(message, field.name, run_id)
        elif field.message_type is not None and depth < 3 and not field.message_type.GetOptions().map_entry:
            kind: Any = field.message_type
            inner = GetMessageClass(kind)()
            name_run(inner, run_id, depth + 1)
            if not inner.ByteSize():
                continue
            value = getattr(message, field.name)
            if isinstance(value, Message):
                value.CopyFrom(inner)
            else:
                value.append(inner)


@pytest.fixture(params=["clear", "mtls"])
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=[*METHODS, PEER])
def rpc(request: pytest.FixtureRequest, world: World, transport: str) -> Rpc:
    return Rpc(world, transport, request.param)


Tokens = Callable[[Role], str | None]


@pytest.mark.parametrize("kind", ["none", "empty", "words", "another's", "altered", "expired", "unsigned"])
def test_without_a_good_token_nothing_is_reached(rpc: Rpc, world: World, kind: str) -> None:
    role = rpc.allowed[0]
    good = world.token(role)
    head, body, signature = good.split(".")
    other = "A" if signature[10] != "A" else "B"
    tokens: dict[str, str | None] = {
        "none": None,
        "empty": "",
        "words": "correct horse",
        "another's": world.token(role, signer=Ed25519PrivateKey.generate()),
        "altered": f"{head}.{body}.{signature[:10]}{other}{signature[11:]}",
        "expired": world.token(role, ttl_s=-120),
        "unsigned": f"{head}.{body}.",
    }
    assert rpc.call(tokens[kind], certificate=role) is UNKNOWN


def test_no_other_role_gets_through(rpc: Rpc, world: World) -> None:
    for role in sorted(set(Role) - set(rpc.allowed)):
        assert rpc.call(world.token(role), certificate=role) is DENIED, role


def test_a_token_of_another_run_is_refused(rpc: Rpc, world: World) -> None:
    for role in rpc.allowed:
        assert rpc.call(world.token(role, run_id=OTHER), certificate=role) is DENIED, role


def test_a_token_of_one_run_is_refused_where_no_run_is_named(rpc: Rpc, world: World) -> None:
    for role in rpc.allowed:
        assert rpc.call(world.token(role, run_id=RUN), certificate=role, run_id="") is DENIED, role


def test_each_role_that_may_gets_through_and_with_a_token_of_the_run_too(rpc: Rpc, world: World) -> None:
    for role in rpc.allowed:
        assert rpc.call(world.token(role), certificate=role) is None, role
        if can_name_run(rpc.method):
            assert rpc.call(world.token(role, run_id=RUN), certificate=role) is None, role


@pytest.mark.parametrize("transport", ["mtls"], indirect=True)
def test_token_and_certificate_have_to_be_of_one_role(rpc: Rpc, world: World) -> None:
    for role in rpc.allowed:
        for other in sorted(set(Role) - {role}):
            assert rpc.call(world.token(role), certificate=other) is DENIED, (role, other)


@pytest.mark.parametrize("transport", ["mtls"], indirect=True)
def test_who_shows_no_certificate_does_not_get_as_far_as_a_token(rpc: Rpc, world: World) -> None:
    assert rpc.call(world.token(rpc.allowed[0])) is grpc.StatusCode.UNAVAILABLE
