"""Defines and checks the settings of the gateway."""

from typing import Annotated, Final

from msgspec import Meta, Struct

from ebbtide.auth.credential_files import ReloadedFiles, read_authority, read_file, read_pair
from ebbtide.auth.role_tokens import is_signed, public_keys
from ebbtide.auth.security import ClientSecurity, TokenCheck, refuse_clear
from ebbtide.errors import InvalidRequest
from ebbtide.gateway.access import KeyRing, RequestLimits, SessionLimits
from ebbtide.runtime import ProcessSettings

_KEYS: Final = "door.token_keys"


class TlsSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How clients come in: over TLS if there is a certificate, each with a key."""

    tls_cert: Annotated[str, Meta(description="PEM file of the certificate chain that clients see")] = ""
    tls_key: Annotated[str, Meta(description="PEM file of that certificate's private key")] = ""
    client_ca: Annotated[
        str, Meta(description="PEM file of authorities; clients must then present certificates as well")
    ] = ""
    allow_insecure: Annotated[bool, Meta(description="listen on addresses other than loopback without TLS")] = False
    request_id_header: Annotated[
        str,
        Meta(
            min_length=1,
            description="header of the request id under which a client reconnects; change it behind proxies that set "
            "their own",
        ),
    ] = "X-Request-ID"
    token_keys: Annotated[
        str,
        Meta(
            description="PEM file of public keys; clients' keys are tokens that these have signed (see ebbtide tokens)",
            extra={"shared": True},
        ),
    ] = ""


class GatewaySettings(ProcessSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of one gateway."""

    listen: Annotated[str, Meta(description="address for clients, host:port; port 0 picks a free port")] = (
        "127.0.0.1:7640"
    )
    coordinator: Annotated[
        str, Meta(description="address of the coordinator; separate several by commas", extra={"shared": True})
    ] = "127.0.0.1:7600"
    security: ClientSecurity = ClientSecurity()
    door: TlsSettings = TlsSettings()
    limits: RequestLimits = RequestLimits()
    sessions: SessionLimits = SessionLimits()
    holder: Annotated[
        str, Meta(description="unique name of this gateway; by default one made of host, process and a random part")
    ] = ""
    patience_s: Annotated[
        float, Meta(gt=0, description="seconds that requests wait for an unreachable coordinator")
    ] = 600.0
    drain_s: Annotated[
        float,
        Meta(ge=0, description="seconds that requests in flight have to finish when the gateway is asked to stop"),
    ] = 30.0
    idle_s: Annotated[
        float, Meta(gt=0, description="seconds without a request after which a run is reopened by its next request")
    ] = 300.0
    model_roots: Annotated[
        tuple[str, ...], Meta(description="folders in which a run's model may be", extra={"shared": True})
    ] = ("/",)
    max_model_len: Annotated[
        int, Meta(ge=0, description="maximum tokens of prompt and response together; 0 takes the model's own limit")
    ] = 0
    tool_parser: Annotated[
        str, Meta(description="name in vLLM of the models' tool call parser; an empty string disables it")
    ] = ""
    reasoning_parser: Annotated[str, Meta(description="name in vLLM of the models' reasoning parser")] = ""
    template_processes: Annotated[int, Meta(ge=1, description="number of processes that render chat templates")] = 2

    def checked(self) -> None:
        """Raise `InvalidRequest` naming the first invalid field, before anything is started."""
        host, _, port = self.listen.rpartition(":")
        if not host or not port.isdecimal() or int(port) > 65535:
            raise InvalidRequest("give host:port", field="listen")
        if read_pair(self.door.tls_cert, self.door.tls_key) is None:
            refuse_clear(self.listen, allowed=self.door.allow_insecure, field="listen")
            if self.door.client_ca:
                raise InvalidRequest("a gateway with client_ca needs a certificate", field="door.tls_cert")
        if self.door.client_ca:
            read_authority(self.door.client_ca)
        self.key_ring()

    def key_ring(self) -> KeyRing:
        """The keys that clients may show. Raises `InvalidRequest` naming the field if there are none.

        The cluster's shared secret is one, but a signed token is not: it is for the gateway's own calls.
        """
        security, path = self.security, self.door.token_keys

        def secret() -> TokenCheck | None:
            bearer = security.bearer()
            return None if is_signed(bearer.removeprefix("Bearer ")) else TokenCheck(bearer)

        if secret() is None and not path:
            text = "is required, as the gateway's own token is a signed one: name the public keys of clients' keys"
            raise InvalidRequest(text, field=_KEYS)
        shared = ReloadedFiles((security.token_file,), secret)
        if not path:
            return KeyRing(shared, None)
        return KeyRing(shared, ReloadedFiles((path,), lambda: public_keys(read_file(path, _KEYS), field=_KEYS)))
