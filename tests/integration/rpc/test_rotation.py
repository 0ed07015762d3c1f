"""Tokens, keys and certificates are replaced on disk while servers and clients live, and nobody has to restart."""

import asyncio
import datetime as dt
import ssl
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography import x509

from ebbtide.auth.role_tokens import mint, signing_key
from ebbtide.auth.roles import Role
from ebbtide.auth.security import ClientSecurity, ServerSettings
from ebbtide.cli.credentials import certificates, signing_keys
from ebbtide.cli.credentials.certificates import write_file
from ebbtide.errors import PermissionDenied, Unauthenticated, Unavailable
from ebbtide.rpc.channel import Channel, write
from ebbtide.rpc.status_table import translated
from ebbtide.v1 import fleet_pb2, fleet_pb2_grpc

TOKEN = "correct horse"


class Folder:
    """An authority with certificates of a server and a worker, and the settings that name their files."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.make()
        ca = str(path / "ca.pem")
        own = {name: (str(path / f"{name}.pem"), str(path / f"{name}.key")) for name in ("server", "worker")}
        self.server = ServerSettings(tls_ca=ca, tls_cert=own["server"][0], tls_key=own["server"][1], token=TOKEN)
        self.client = ClientSecurity(tls_ca=ca, tls_cert=own["worker"][0], tls_key=own["worker"][1], token=TOKEN)

    def make(self) -> None:
        certificates.init(self.path, 2)
        certificates.issue(self.path, "server", [Role.COORDINATOR], ["127.0.0.1"], 1)
        certificates.issue(self.path, "worker", [Role.WORKER], [], 1)

    def replace(self) -> None:
        """By an authority that the former one knows nothing of, and what it issues."""
        for file in self.path.iterdir():
            file.unlink()
        self.make()

    def serial(self, name: str) -> int:
        return x509.load_pem_x509_certificate((self.path / f"{name}.pem").read_bytes()).serial_number


async def shown(address: str, folder: Folder) -> int:
    """The serial number of the certificate that the server shows to a new connection."""
    context = ssl.create_default_context(cafile=str(folder.path / "ca.pem"))
    context.load_cert_chain(folder.path / "worker.pem", folder.path / "worker.key")
    context.set_alpn_protocols(["h2"])
    host, _, port = address.rpartition(":")
    _, writer = await asyncio.open_connection(host, int(port), ssl=context)
    found = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    return x509.load_der_x509_certificate(found).serial_number


async def test_a_new_authority_and_all_it_issued_are_taken_up_while_streams_go_on(cluster: Any, tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    server = await cluster.serve(folder.server)
    channel: Channel = await cluster.connect(server.address, folder.client)
    stub: Any = fleet_pb2_grpc.FleetStub(channel)
    stream = stub.Append()
    await write(stream, fleet_pb2.AppendRequest(sequence=1))
    assert (await stream.read()).sequence == 1
    assert await shown(server.address, folder) == folder.serial("server")

    folder.replace()
    assert await cluster.call(channel, "stream_stream")  # by the same stubs, on a connection of the new authority
    assert await shown(server.address, folder) == folder.serial("server")
    assert channel.former == 1  # for the stream's sake
    await write(stream, fleet_pb2.AppendRequest(sequence=2))
    assert (await stream.read()).sequence == 2
    await stream.done_writing()
    assert await stream.code() is grpc.StatusCode.OK
    assert await cluster.call(channel, "stream_stream")
    assert channel.former == 0


async def test_a_closed_channel_stays_closed_whatever_is_replaced(cluster: Any, tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    channel: Channel = await cluster.connect((await cluster.serve(folder.server)).address, folder.client)
    assert await cluster.call(channel, "stream_stream")
    await channel.close()
    folder.replace()
    with pytest.raises(grpc.aio.UsageError):
        await cluster.call(channel, "stream_stream")


async def test_who_kept_the_former_certificate_gets_no_new_connection(cluster: Any, tmp_path: Path) -> None:
    folder = Folder(tmp_path / "used")
    former = Folder(tmp_path / "old")
    server = await cluster.serve(folder.server)
    stranger = ClientSecurity(
        token=TOKEN, tls_ca=folder.server.tls_ca, tls_cert=former.client.tls_cert, tls_key=former.client.tls_key
    )
    with pytest.raises(Unavailable), translated("coordinator"):
        await cluster.call(await cluster.connect(server.address, stranger), "unary_unary", timeout=10)


async def test_half_of_a_pair_changes_nothing_until_the_other_half_comes(cluster: Any, tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    server = await cluster.serve(folder.server)
    channel: Channel = await cluster.connect(server.address, folder.client)
    assert await cluster.call(channel, "stream_stream")
    before, keys = folder.serial("server"), {}
    for name in ("server", "worker"):
        former = (tmp_path / f"{name}.key").read_bytes()
        certificates.renew(tmp_path, name, 1)
        keys[name] = (tmp_path / f"{name}.key").read_bytes()
        write_file(tmp_path / f"{name}.key", former, mode=0o600)
    assert await cluster.call(channel, "stream_stream")
    assert channel.former == 0
    for name, key in keys.items():
        write_file(tmp_path / f"{name}.key", key, mode=0o600)
    assert await cluster.call(channel, "stream_stream")
    assert await shown(server.address, folder) == folder.serial("server") != before


async def test_a_token_that_was_replaced_is_shown_from_the_next_call_on(cluster: Any, tmp_path: Path) -> None:
    public = str(signing_keys.make(tmp_path))
    key = signing_key((tmp_path / "tokens.key").read_bytes(), field="key")
    file = tmp_path / "token"
    write_file(file, mint(key, Role.WORKER, ttl_s=-120).encode(), mode=0o600)
    server = await cluster.serve(ServerSettings(token_keys=public))
    channel = await cluster.connect(server.address, ClientSecurity(token_file=str(file)))
    with pytest.raises(Unauthenticated, match="has expired"), translated("coordinator"):
        await cluster.call(channel, "stream_stream")
    write_file(file, mint(key, Role.WORKER, ttl_s=60).encode(), mode=0o600)
    assert await cluster.call(channel, "stream_stream")
    with pytest.raises(PermissionDenied, match=r"role worker.*operator or trainer or user"), translated("coordinator"):
        await cluster.call(channel, "unary_unary")
    write_file(file, mint(key, Role.TRAINER, ttl_s=60).encode(), mode=0o600)
    assert await cluster.call(channel, "unary_unary")
    file.unlink()  # in the middle of being replaced: the last one is still good
    assert await cluster.call(channel, "unary_unary")


async def test_signing_keys_are_rotated_and_retired_under_a_running_server(cluster: Any, tmp_path: Path) -> None:
    settings = ServerSettings(token_keys=str(signing_keys.make(tmp_path)))
    server = await cluster.serve(settings)
    channels = []
    for step in (None, signing_keys.rotate):
        if step is not None:
            step(tmp_path)
        token = signing_keys.issue(tmp_path, Role.USER, run_id="", ttl_s=60, name="")
        channels.append(await cluster.connect(server.address, ClientSecurity(token=token)))
    for channel in channels:
        assert await cluster.call(channel, "unary_unary")
    signing_keys.retire(tmp_path)
    assert await cluster.call(channels[1], "unary_unary")
    with pytest.raises(Unauthenticated, match="does not know"), translated("coordinator"):
        await cluster.call(channels[0], "unary_unary")


async def test_a_shared_secret_that_was_replaced_counts_from_then_on_on_both_sides(
    cluster: Any, tmp_path: Path
) -> None:
    file = tmp_path / "token"
    file.write_text("first")
    server = await cluster.serve(ServerSettings(token_file=str(file)))
    channel = await cluster.connect(server.address, ClientSecurity(token_file=str(file)))
    former = await cluster.connect(server.address, ClientSecurity(token="first"))
    assert await cluster.call(former, "unary_unary")
    write_file(file, b"second", mode=0o600)
    assert await cluster.call(channel, "unary_unary")
    with pytest.raises(Unauthenticated), translated("coordinator"):
        await cluster.call(former, "unary_unary")


def test_a_certificate_is_renewed_with_its_roles_and_hosts(tmp_path: Path) -> None:
    certificates.init(tmp_path, 30)
    certificates.issue(tmp_path, "w1", [Role.WORKER, Role.RELAY], ["10.0.0.2", "w1.local", "::1"], 10)
    before = certificates.read(tmp_path, "w1")
    key = (tmp_path / "w1.key").read_bytes()
    certificates.renew(tmp_path, "w1", 0)
    after = certificates.read(tmp_path, "w1")
    assert (after.roles, after.hosts, after.lifetime) == (before.roles, before.hosts, dt.timedelta(days=10))
    assert set(after.hosts) == {"10.0.0.2", "w1.local", "::1"}
    assert (tmp_path / "w1.key").read_bytes() != key
    assert (tmp_path / "w1.key").stat().st_mode & 0o077 == 0


async def test_an_authority_that_was_copied_by_half_leaves_the_former_in_use(cluster: Any, tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    server = await cluster.serve(folder.server)
    channel: Channel = await cluster.connect(server.address, folder.client)
    whole = (tmp_path / "ca.pem").read_bytes()
    for rest in (whole[: len(whole) // 2], whole.replace(b"M", b"!"), (tmp_path / "ca.key").read_bytes()):
        write_file(tmp_path / "ca.pem", rest, mode=0o644)
        assert await cluster.call(channel, "stream_stream")
