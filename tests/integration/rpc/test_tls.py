"""TLS on real sockets, with certificates made here."""

import datetime as dt
import ipaddress
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from ebbtide.auth.security import ClientSecurity, ServerSettings
from ebbtide.errors import Unauthenticated, Unavailable
from ebbtide.rpc.status_table import translated

TOKEN = "correct horse"


class Authority:
    """A certificate authority of one test."""

    def __init__(self, directory: Path, name: str) -> None:
        self._directory, self._key = directory, ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self.ca = self._write(f"{name}.ca", self._sign(self._name, self._key.public_key(), ca=True))

    def issue(self, name: str) -> tuple[str, str]:
        """Paths of a certificate for 127.0.0.1 and of its key."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        private = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        certificate = self._sign(subject, key.public_key(), ca=False)
        return self._write(f"{name}.crt", certificate), self._write(f"{name}.key", private)

    def _sign(self, subject: x509.Name, key: ec.EllipticCurvePublicKey, *, ca: bool) -> bytes:
        now = dt.datetime.now(dt.UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - dt.timedelta(hours=1))
            .not_valid_after(now + dt.timedelta(hours=1))
            .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
            .add_extension(
                x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False
            )
        )
        return builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    def _write(self, name: str, data: bytes) -> str:
        path = self._directory / name
        path.write_bytes(data)
        return str(path)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path, "ours")


async def serve(cluster: Any, authority: Authority, **options: Any) -> str:
    cert, key = authority.issue("server")
    server = await cluster.serve(ServerSettings(token=TOKEN, tls_cert=cert, tls_key=key, **options))
    return str(server.address)


@pytest.mark.parametrize("method", ["unary_unary", "unary_stream", "stream_unary", "stream_stream"])
async def test_calls_of_all_kinds_go_over_tls(cluster: Any, authority: Authority, method: str) -> None:
    address = await serve(cluster, authority)
    assert await cluster.call(await cluster.connect(address, ClientSecurity(token=TOKEN, tls_ca=authority.ca)), method)


async def test_tls_does_not_replace_the_token(cluster: Any, authority: Authority) -> None:
    channel = await cluster.connect(await serve(cluster, authority), ClientSecurity(token="no", tls_ca=authority.ca))
    with pytest.raises(Unauthenticated), translated("coordinator"):
        await cluster.call(channel, "unary_unary")


async def test_a_server_of_another_authority_is_not_trusted(cluster: Any, authority: Authority, tmp_path: Path) -> None:
    other = Authority(tmp_path, "other")
    channel = await cluster.connect(await serve(cluster, authority), ClientSecurity(token=TOKEN, tls_ca=other.ca))
    with pytest.raises(Unavailable, match="with TLS as here"), translated("coordinator"):
        await cluster.call(channel, "unary_unary", timeout=10)
    assert cluster.probe.calls == []


async def test_a_client_in_the_clear_gets_nothing_from_a_tls_server(cluster: Any, authority: Authority) -> None:
    channel = await cluster.connect(await serve(cluster, authority))
    with pytest.raises(Unavailable), translated("coordinator"):
        await cluster.call(channel, "unary_unary", timeout=10)
    assert cluster.probe.calls == []


async def test_a_server_that_names_an_authority_admits_only_its_clients(
    cluster: Any, authority: Authority, tmp_path: Path
) -> None:
    address = await serve(cluster, authority, tls_ca=authority.ca)
    stranger = ClientSecurity(token=TOKEN, tls_ca=authority.ca)
    with pytest.raises(Unavailable), translated("coordinator"):
        await cluster.call(await cluster.connect(address, stranger), "unary_unary", timeout=10)
    cert, key = authority.issue("client")
    known = ClientSecurity(token=TOKEN, tls_ca=authority.ca, tls_cert=cert, tls_key=key)
    assert await cluster.call(await cluster.connect(address, known), "unary_unary")


async def test_tls_lets_a_server_listen_off_the_loopback(cluster: Any, authority: Authority) -> None:
    address = await serve(cluster, authority, listen="0.0.0.0:0")
    port = address.rpartition(":")[2]
    channel = await cluster.connect(f"127.0.0.1:{port}", ClientSecurity(token=TOKEN, tls_ca=authority.ca))
    assert await cluster.call(channel, "unary_unary")
