"""Settings that would leave a gateway without a lock are refused by name."""

from pathlib import Path

import msgspec
import pytest

from ebbtide.auth.roles import Role
from ebbtide.auth.security import ClientSecurity
from ebbtide.errors import InvalidRequest, Unauthenticated
from ebbtide.gateway.service import own_holder
from ebbtide.gateway.settings import GatewaySettings, TlsSettings
from tests.unit.gateway.http.test_keys import SIGNER, token

SHARED = ClientSecurity(token="secret")


def public_key(folder: Path) -> str:
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    path = folder / "public.pem"
    path.write_bytes(SIGNER.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    return str(path)


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        (GatewaySettings(security=SHARED, listen="nowhere"), "listen"),
        (GatewaySettings(security=SHARED, listen="0.0.0.0:80"), "listen"),
        (GatewaySettings(security=SHARED, door=TlsSettings(client_ca="ca.pem")), "door.tls_cert"),
        (GatewaySettings(security=SHARED, door=TlsSettings(tls_cert="c.pem")), "tls_key"),
        (GatewaySettings(security=SHARED, door=TlsSettings(token_keys="missing.pem")), "door.token_keys"),
        (GatewaySettings(), "token"),
    ],
)
def test_faulty_settings_name_their_field(settings: GatewaySettings, field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        settings.checked()
    assert refused.value.field == field


def test_the_gateways_own_token_opens_nothing(tmp_path: Path) -> None:
    own = token(Role.GATEWAY)
    settings = GatewaySettings(security=ClientSecurity(token=own))
    with pytest.raises(InvalidRequest, match="name the public keys"):
        settings.checked()
    with_keys = msgspec.structs.replace(settings, door=TlsSettings(token_keys=public_key(tmp_path)))
    ring = with_keys.key_ring()
    with pytest.raises(Unauthenticated):
        ring.admit({"authorization": "Bearer secret"})
    assert ring.admit({"authorization": f"Bearer {token(Role.AGENT, name='a', run_id='r-1')}"}).run_id == "r-1"


def test_the_shared_secret_may_do_everything() -> None:
    key = GatewaySettings(security=SHARED).key_ring().admit({"x-api-key": "secret"})
    assert key.admits("any-run")


def test_gateways_of_the_same_host_and_process_id_are_two_holders() -> None:
    assert own_holder() != own_holder()
