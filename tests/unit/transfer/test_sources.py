"""Which addresses a reader goes to: those that only who runs the relay can name, and plain ones of holders."""

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from ebbtide.auth.role_tokens import mint
from ebbtide.auth.roles import Role
from ebbtide.auth.security import ClientSecurity
from ebbtide.errors import InvalidRequest, NotReady
from ebbtide.transfer.sources import GrpcSource, check_peer, opener
from ebbtide.transfer.static_source import StaticSource
from ebbtide.types.weights import BlobSource, Holder

READER = Holder(name="me", site="here", host="mine")
NO_PEERS = [
    "http://169.254.169.254/latest",
    "https://169.254.169.254:443",
    "unix:/run/secrets.sock",
    "unix:80",
    "UNIX:80",
    "unix-abstract:a:1",
    "dns:80",
    "dns:///a:80",
    "ipv4:10.0.0.1:80",
    "xds:1",
    "a b:5",
    "a\n:5",
    "user@host:5",
    "host:5/path",
    "host",
    ":5",
    "host:",
    "host:99999",
    "host:-1",
    "host:\u0665",
    "",
]


@pytest.mark.parametrize("address", NO_PEERS)
def test_what_is_no_plain_address_is_no_peer(address: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        check_peer(address, field="holder.address")
    assert refused.value.field == "holder.address"
    with pytest.raises(InvalidRequest):
        opener(ClientSecurity(token="secret", allow_insecure=True))(BlobSource(name="w1", address=address), READER)


@pytest.mark.parametrize("address", ["127.0.0.1:7620", "[::1]:7620", "worker-7.north_1.internal:65535"])
def test_host_and_port_are(address: str) -> None:
    assert check_peer(address, field="address") == address


async def test_a_url_is_read_only_where_the_relays_own_settings_name_it() -> None:
    open_source = opener(ClientSecurity(token="secret"))
    copy = open_source(BlobSource(name="copy", address="https://example.org/v", static=True), READER)
    assert isinstance(copy, StaticSource)
    peer = open_source(BlobSource(name="w1", address="127.0.0.1:7620"), READER)
    assert isinstance(peer, GrpcSource)
    await peer.close()
    for address in ("127.0.0.1:7620", "file:///etc/passwd"):
        with pytest.raises(InvalidRequest):
            open_source(BlobSource(name="copy", address=address, static=True), READER)


async def test_workers_that_serve_are_shown_no_token_that_may_do_more_than_theirs() -> None:
    source, key = BlobSource(name="w1", address="127.0.0.1:7620"), Ed25519PrivateKey.generate()
    for role in Role:
        open_source = opener(ClientSecurity(token=mint(key, role, ttl_s=60)))
        if role in {Role.WORKER, Role.RELAY}:
            await open_source(source, READER).close()
        else:
            with pytest.raises(NotReady, match="shown to relays"):
                open_source(source, READER)
