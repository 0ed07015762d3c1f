"""Defines and checks the settings of the gateway."""

from typing import Annotated, Final

from msgspec import Meta, Struct

from ebbtide.auth.reloaded_files import ReloadedFiles
from ebbtide.auth.role_tokens import is_signed, public_keys
from ebbtide.auth.security import ClientSecurity, TokenCheck, refuse_clear
from ebbtide.auth.tls import read_authority, read_file, read_pair
from ebbtide.errors import InvalidRequest
from ebbtide.gateway.access import KeyRing, RequestLimits, SessionLimits
from ebbtide.runtime import ProcessSettings

_KEYS: Final = "door.token_keys"


class DoorSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How clients come in: over TLS if there is a certificate, each with a key."""

    tls_cert: Annotated[str, Meta(description="PEM file of the certificate chain that clients see")] = ""
    tls_key: Annotated[str, Meta(description="PEM file of its private key")] = ""
    client_ca: Annotated[
        str, Meta(description="PEM file of authorities; with it clients must show certificates, too")
    ] = ""
    allow_insecure: Annotated[bool, Meta(description="listen on addresses other than loopback without TLS")] = False
    request_id_header: Annotated[
        str,
        Meta(
            min_length=1,
            description="header of the id under which a client comes back; another behind proxies that add their own",
        ),
    ] = "X-Request-ID"
    token_keys: Annotated[
        str,
        Meta(
            description="PEM file of public keys; clients' keys are tokens that these have signed (ebbtide tokens)",
            extra={"shared": True},
        ),
    ] = ""


class GatewaySettings(ProcessSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of one gateway."""

    listen: Annotated[str, Meta(description="address for clients: host:port (port 0: any free one)")] = "127.0.0.1:7640"
    coordinator: Annotated[
        str, Meta(description="address of the coordinator; separate several by commas", extra={"shared": True})
    ] = "127.0.0.1:7600"
    security: ClientSecurity = ClientSecurity()
    door: DoorSettings = DoorSettings()
    limits: RequestLimits = RequestLimits()
    sessions: SessionLimits = SessionLimits()
    holder: Annotated[str, Meta(description="unique name of this gateway; empty: of host, process and chance")] = ""
    patience_s: Annotated[float, Meta(gt=0, description="requests wait so long for a coordinator that is away")] = 600.0
    drain_s: Annotated[
        float, Meta(ge=0, description="requests under way get so long to finish when the gateway is asked to end")
    ] = 30.0
    idle_s: Annotated[
        float, Meta(gt=0, description="a run that nobody asks of for so long is opened again by its next request")
    ] = 300.0
    model_roots: Annotated[
        tuple[str, ...], Meta(description="folders in which a run's model may be", extra={"shared": True})
    ] = ("/",)
    max_model_len: Annotated[
        int, Meta(ge=0, description="tokens of prompt and response together, at most; 0: what the model states")
    ] = 0
    tool_parser: Annotated[str, Meta(description="vLLM's name of the models' parser of tool calls; empty: none")] = ""
    reasoning_parser: Annotated[str, Meta(description="vLLM's name of the models' parser of reasoning")] = ""
    template_processes: Annotated[int, Meta(ge=1, description="processes that render chat templates")] = 2

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
