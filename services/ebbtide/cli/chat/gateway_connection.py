"""Calls a gateway over HTTP, with the standard library alone: a JSON answer, or the events of a stream.

It blocks, so that Ctrl-C ends a wait at once.
"""

import http.client
import json
import ssl
from collections.abc import Iterator
from contextlib import closing
from typing import Any, Final
from urllib.parse import SplitResult, urlsplit

from msgspec import Struct

from ebbtide.cli.waiting import Waiting
from ebbtide.errors import EbbtideError, InvalidRequest, NotFound, PermissionDenied, Unauthenticated, Unavailable

#: A person waits; a gateway on the way answers within milliseconds.
_CONNECT_S: Final = 5.0
#: Longer than a gateway waits for a coordinator that is away (its `patience_s`, 600), before it answers anything.
_BEGIN_S: Final = 660.0
#: Streams show every 15 s (`limits.keep_alive_s`) that they live.
_SILENT_S: Final = 60.0
_REFUSALS: Final[dict[int, type[EbbtideError]]] = {401: Unauthenticated, 403: PermissionDenied, 404: NotFound}
_LONGEST_LINE: Final = 1 << 20


class GatewayFiles(Struct, frozen=True, kw_only=True):
    """PEM files for TLS. Without `authority` the system's authorities count."""

    authority: str = ""
    certificate: str = ""
    key: str = ""


class GatewayConnection:
    """Makes a connection for each call."""

    def __init__(self, url: str, key: str, files: GatewayFiles | None = None) -> None:
        """`key`: a token. Raises `InvalidRequest` naming `--gateway`, or the bad file."""
        self.url = url.rstrip("/")
        self._parts = _checked(self.url)
        self._headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
        self._context = _tls(files or GatewayFiles()) if self._parts.scheme == "https" else None

    @property
    def is_secure(self) -> bool:
        """Whether TLS hides the key."""
        return self._context is not None

    @property
    def address(self) -> str:
        """host:port."""
        host = self._parts.hostname or ""
        return f"{f'[{host}]' if ':' in host else host}:{self._parts.port or 80}"

    def get(self, path: str) -> dict[str, Any]:
        """The JSON object of an answer. Raises `Unavailable`, and what the gateway refuses with."""
        with closing(self._connected()) as connection:
            answer = self._answer(connection, "GET", path, None)
            found: dict[str, Any] = _object(answer.read())
            return found

    def events(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The data of a stream's events, as they come. Raises as `get`, also in the middle."""
        with closing(self._connected()) as connection:
            answer = self._answer(connection, "POST", path, json.dumps(body).encode())
            if connection.sock is not None:
                connection.sock.settimeout(_SILENT_S)
            try:
                with Waiting(f"the rest of the answer of {self.url}") as waiting:
                    for event in _events(answer):
                        waiting.heard()
                        yield event
            except (OSError, http.client.HTTPException) as error:
                raise Unavailable(f"{self.url} went away in the middle of an answer ({_text(error)})") from None

    def _connected(self) -> http.client.HTTPConnection:
        host, port = self._parts.hostname or "", self._parts.port
        if self._context is not None:
            secure = http.client.HTTPSConnection(host, port, timeout=_CONNECT_S, context=self._context)
            connection: http.client.HTTPConnection = secure
        else:
            connection = http.client.HTTPConnection(host, port, timeout=_CONNECT_S)
        try:
            with Waiting(f"the gateway at {self.url}"):
                connection.connect()
        except ssl.SSLCertVerificationError as error:
            text = f"{self.url} shows a certificate that is not trusted ({error.verify_message}); name its authority"
            raise InvalidRequest(text, field="--tls-ca") from None
        except OSError as error:
            text = (
                f"no gateway answers at {self.url} ({_text(error)}); start one (ebbtide gateway), or name another by "
            )
            raise Unavailable(f"{text}--gateway") from None
        connection.sock.settimeout(_BEGIN_S)
        return connection

    def _answer(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: bytes | None
    ) -> http.client.HTTPResponse:
        try:
            with Waiting(f"the gateway at {self.url}"):
                connection.request(method, self._parts.path + path, body, self._headers)
                answer = connection.getresponse()
            if answer.status == 200:
                return answer
            refused = answer.read(_LONGEST_LINE)
        except (OSError, http.client.HTTPException) as error:
            raise Unavailable(f"{self.url} did not answer ({_text(error)})") from None
        raise _refusal(answer.status, refused)


def _checked(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        good = False
    if not good:
        raise InvalidRequest(f"{url!r} is no URL of a gateway; write http://host:port", field="--gateway")
    return parts


def _tls(files: GatewayFiles) -> ssl.SSLContext:
    for name, path in (("--tls-ca", files.authority), ("EBBTIDE_TLS_CERT", files.certificate)):
        try:
            if name == "--tls-ca":
                context = ssl.create_default_context(cafile=path or None)
            elif path:
                context.load_cert_chain(path, files.key or None)
        except (OSError, ssl.SSLError) as error:
            raise InvalidRequest(f"{path!r} cannot be read ({_text(error)})", field=name) from None
    return context


def _events(answer: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """The data of server-sent events, each in one line; comments and names are left out."""
    while line := answer.readline(_LONGEST_LINE):
        if not line.startswith(b"data:"):
            continue
        data = line.removeprefix(b"data:").strip()
        if data == b"[DONE]":
            return
        event = _object(data)
        if "error" in event:
            raise _refusal(int(event["error"].get("code") or 500), data)
        yield event
    raise http.client.IncompleteRead(b"")


def _refusal(status: int, body: bytes) -> EbbtideError:
    """The gateway's own message names the field and the remedy."""
    said = _object(body).get("error")
    text = said.get("message", "") if isinstance(said, dict) else ""
    if status == 400:
        return InvalidRequest(text or "the gateway refused the request")
    kind = _REFUSALS.get(status, Unavailable)
    return kind(text or f"the answer was {status} {http.client.responses.get(status, '')}; is this a gateway's URL?")


def _object(data: bytes) -> dict[str, Any]:
    try:
        found = json.loads(data)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _text(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
