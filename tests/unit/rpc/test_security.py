"""Tokens are needed and never shown; nothing leaves the loopback in the clear unless allowed."""

from pathlib import Path

import pytest

from ebbtide.auth.admission import admission_of
from ebbtide.auth.security import ClientSecurity, ServerSettings, TokenCheck, is_loopback
from ebbtide.errors import InvalidRequest, Unauthenticated
from ebbtide.rpc.channel import check_address, open_channel
from ebbtide.rpc.server import Server

INSIDE = ["127.0.0.1:7600", "127.8.8.8:1", "localhost:7600", "[::1]:7600", "unix:/run/ebbtide.sock"]
OUTSIDE = [
    "0.0.0.0:7600",
    "[::]:7600",
    "10.0.0.1:7600",
    "coordinator:7600",
    "localhost.example.com:1",
    "127.0.0.1.nip.io:1",
]


@pytest.mark.parametrize("address", INSIDE)
def test_loopback_and_unix_sockets_need_no_tls(address: str) -> None:
    assert is_loopback(address)
    assert ServerSettings(token="t", listen=address).credentials() is None
    assert ClientSecurity(token="t").credentials(address) is None


@pytest.mark.parametrize("address", OUTSIDE)
def test_any_other_address_needs_tls_or_permission_on_both_sides(address: str) -> None:
    assert not is_loopback(address)
    with pytest.raises(InvalidRequest, match="TLS is off") as refused:
        Server(ServerSettings(token="t", listen=address), [])
    assert refused.value.field == "listen"
    with pytest.raises(InvalidRequest, match="in the clear") as refused:
        open_channel(address, ClientSecurity(token="t"))
    assert refused.value.field == "target"
    assert ServerSettings(token="t", listen=address, allow_insecure=True).credentials() is None
    assert ClientSecurity(token="t", allow_insecure=True).credentials(address) is None


@pytest.mark.parametrize("address", ["", "7600", "host", ":7600", "host:", "host:x", "host:70000", "http://host:1"])
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(InvalidRequest, match="is no address"):
        check_address(address, field="target")


def test_a_token_is_always_needed() -> None:
    for settings in (ServerSettings(), ClientSecurity()):
        with pytest.raises(InvalidRequest, match="EBBTIDE_TOKEN") as refused:
            settings.bearer()
        assert refused.value.field == "token"


def test_a_token_file_that_is_missing_empty_or_doubled_is_refused(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.write_text("\n")
    with pytest.raises(InvalidRequest, match="No such file"):
        ClientSecurity(token_file=str(tmp_path / "none")).bearer()
    with pytest.raises(InvalidRequest, match="is required"):
        ClientSecurity(token_file=str(empty)).bearer()
    with pytest.raises(InvalidRequest, match="both"):
        ClientSecurity(token="t", token_file=str(empty)).bearer()


@pytest.mark.parametrize("token", ["zwei\nzeilen", "schlüssel", "x" * 1025])
def test_a_token_that_no_header_can_bear_is_refused_unshown(token: str) -> None:
    with pytest.raises(InvalidRequest, match="printable ASCII") as refused:
        ClientSecurity(token=token).bearer()
    assert token not in str(refused.value)


def test_a_token_is_never_shown() -> None:
    for settings in (ServerSettings(token="hunter2"), ClientSecurity(token="hunter2")):
        assert "hunter2" not in repr(settings)
        assert "hunter2" not in str(settings)
        assert "hunter2" not in str(settings.__rich_repr__())
        assert "token_file" in repr(settings)


def test_the_comparison_takes_the_whole_value_as_text_or_bytes() -> None:
    check = TokenCheck("Bearer t")
    assert check("Bearer t")
    assert check(b"Bearer t")
    for value in ("", "Bearer ", "Bearer t ", "bearer t", "t", "Bearer tü"):
        assert not check(value)


def test_the_first_authorization_of_a_call_counts() -> None:
    admission = admission_of(ServerSettings(token="t"))
    admission.admit("/ebbtide.v1.Runs/GetRun", [("x", "y"), ("authorization", "Bearer t")])
    for metadata in (None, [], [("authorization", "wrong"), ("authorization", "Bearer t")]):
        with pytest.raises(Unauthenticated):
            admission.admit("/ebbtide.v1.Runs/GetRun", metadata)


def test_half_a_certificate_or_an_authority_without_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="go together") as refused:
        ServerSettings(token="t", tls_cert="c.pem").credentials()
    assert refused.value.field == "tls_key"
    with pytest.raises(InvalidRequest, match="needs a certificate"):
        ServerSettings(token="t", tls_ca="ca.pem").credentials()
    with pytest.raises(InvalidRequest, match="No such file") as refused:
        ServerSettings(token="t", tls_cert=str(tmp_path / "c"), tls_key=str(tmp_path / "k")).credentials()
    assert refused.value.field == "tls_key"


def test_what_is_no_pem_file_and_a_token_that_is_no_text_are_refused_by_field(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(bytes(range(256)))
    with pytest.raises(InvalidRequest, match=r"tls_cert: .* is no PEM file|tls_key: .* is no PEM file"):
        ServerSettings(token="t", tls_cert=str(file), tls_key=str(file)).credentials()
    with pytest.raises(InvalidRequest, match=r"tls_ca: .* is no PEM file"):
        ClientSecurity(token="t", tls_ca=str(file)).credentials("127.0.0.1:1")
    file.write_bytes(b"-----BEGIN CERTIFICATE-----\nhalf of one\n-----END CERTIFICATE-----\n")
    with pytest.raises(InvalidRequest, match=r"tls_ca: .* an unreadable certificate"):
        ClientSecurity(token="t", tls_ca=str(file)).credentials("127.0.0.1:1")
    file.write_bytes(bytes(range(256)))
    with pytest.raises(InvalidRequest, match="token: must be printable ASCII"):
        ClientSecurity(token_file=str(file)).bearer()
