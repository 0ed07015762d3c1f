"""Runs `ebbtide run chat`: a talk with a run's policy through a gateway, on a terminal or through a pipe.

HTTP by the standard library alone. Calls block, so that Ctrl-C ends a wait at once. Control characters in answers are
replaced, because a policy may write any text.

Invariant: the history alternates between the two sides. A turn that fails leaves no trace in it; one that is stopped
leaves what was shown. It is lost with the process.
"""

import http.client
import json
import os
import ssl
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from typing import Any, Final
from urllib.parse import SplitResult, quote, urlsplit

from msgspec import Struct
from rich.console import Console
from rich.text import Text

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
            remedy = "start one (`ebbtide serve gateway`) or name another by --gateway"
            raise Unavailable(f"no gateway answers at {self.url} ({_text(error)}); {remedy}") from None
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


_PATH: Final = "/v1/chat/completions"


class ChatOptions(Struct, frozen=True, kw_only=True):
    """`version` 0: the one that workers have, the newest as soon as it is installed."""

    system: str = ""
    max_tokens: int | None = None
    temperature: float | None = None
    version: int = 0

    def fields(self) -> dict[str, Any]:
        """Fields of each request."""
        given = {"max_tokens": self.max_tokens, "temperature": self.temperature}
        fields: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        return fields | ({"weight_version": {"exact_version": self.version}} if self.version else {})


class AnswerPart(Struct, frozen=True):
    """What is new of an answer. The last part has the versions, and why it ended."""

    text: str = ""
    reasoning: str = ""
    versions: Sequence[int] = ()  # lowest and highest that sampled a token
    finish: str = ""


class ChatHistory:
    """A conversation with one run."""

    def __init__(self, gateway: GatewayConnection, run_id: str, options: ChatOptions) -> None:
        self._gateway, self._run_id, self._options = gateway, run_id, options
        self.messages: list[dict[str, str]] = []
        if options.system:
            self.messages.append({"role": "system", "content": options.system})

    def ask(self, text: str) -> Iterator[AnswerPart]:
        """Parts of the answer as they come. Close the iterator to stop it. Raises what the gateway refuses with."""
        asked = [*self.messages, {"role": "user", "content": text}]
        body = {"model": self._run_id, "messages": asked, "stream": True, **self._options.fields()}
        said = ""
        try:
            for event in self._gateway.events(_PATH, body):
                if part := _part(event):
                    said += part.text
                    yield part
        except (GeneratorExit, KeyboardInterrupt):
            self._keep(asked, said)
            raise
        self._keep(asked, said)

    def _keep(self, asked: list[dict[str, str]], said: str) -> None:
        self.messages = [*asked, {"role": "assistant", "content": said}]


def _part(event: dict[str, Any]) -> AnswerPart | None:
    choices = event.get("choices") or []
    if not choices:
        return None
    delta, finish = choices[0].get("delta") or {}, choices[0].get("finish_reason") or ""
    versions = [event[name] for name in ("weight_version_start", "weight_version_end") if name in event]
    part = AnswerPart(delta.get("content") or "", delta.get("reasoning") or "", tuple(versions), finish)
    return part if part != AnswerPart() else None


class GatewayTarget(Struct, frozen=True, kw_only=True):
    """Which gateway is asked, and with which key."""

    url: str
    key: str
    authority: str = ""  # PEM file

    def connection(self) -> GatewayConnection:
        """With the user's own certificate if there is one, for gateways that ask for it.

        Raises `InvalidRequest`, also for an address off the loopback without TLS.
        """
        from ebbtide.auth.security import refuse_clear

        certificate, key = (os.environ.get(f"EBBTIDE_TLS_{name}", "") for name in ("CERT", "KEY"))
        files = GatewayFiles(authority=self.authority, certificate=certificate, key=key)
        made = GatewayConnection(self.url, self.key, files)
        if not made.is_secure:
            allowed = os.environ.get("EBBTIDE_ALLOW_INSECURE", "").lower() in ("true", "1")
            refuse_clear(made.address, allowed=allowed, field="--gateway")
        return made


def run(target: GatewayTarget, run_id: str, options: ChatOptions, message: str | None) -> None:
    """Answer one message, or talk if there is none. Raises `EbbtideError`."""
    if message == "":
        raise InvalidRequest("is empty; write something", field="MESSAGE")
    gateway = target.connection()
    if message is not None:
        answer_once(ChatHistory(gateway, run_id, options), message)
        return
    card = gateway.get(f"/v1/models/{quote(run_id, safe='')}")
    newest = card.get("weight_version")
    about = f"run {card.get('id', run_id)}, {f'newest version {newest}' if newest else 'no version yet'}"
    talk(ChatHistory(gateway, run_id, options), f"{about}. Ctrl-C stops an answer, Ctrl-D ends the chat.")


_PROMPT: Final = "> "
_REPLACED: Final = "\N{REPLACEMENT CHARACTER}"
#: Why an answer ended, where a person may wonder.
_ENDS: Final = {"length": "cut at the most tokens", "tool_calls": "it calls a tool"}


def talk(history: ChatHistory, greeting: str) -> None:
    """Read questions until the end of input. Ctrl-C stops an answer; while a question is typed, it ends the chat."""
    console = Console(highlight=False, soft_wrap=True)
    console.print(Text(greeting, "dim"))
    for text in _questions():
        try:
            _show(history.ask(text), console)
        except KeyboardInterrupt:
            console.print(Text(" [stopped]", "dim"))
        except EbbtideError as error:
            console.print(Text(f"{error}", "red"))


def answer_once(history: ChatHistory, text: str) -> None:
    """Print the answer to one question, and nothing else. Raises what the gateway refuses with."""
    for part in history.ask(text):
        sys.stdout.write(plain(part.text))
        sys.stdout.flush()
    sys.stdout.write("\n")


def plain(text: str) -> str:
    """The text without characters that would steer the terminal."""
    return "".join(one if one.isprintable() or one in "\n\t" else _REPLACED for one in text)


def _questions() -> Iterator[str]:
    with suppress(ImportError):
        import readline  # noqa: F401 - gives `input` a history and its keys
    while True:
        try:
            text = input(_PROMPT).strip()
        except (EOFError, KeyboardInterrupt):
            sys.stdout.write("\n")
            return
        if text:
            yield text


def _show(parts: Iterator[AnswerPart], console: Console) -> None:
    last = AnswerPart()
    for part in parts:
        console.print(Text(plain(part.reasoning), "dim"), Text(plain(part.text)), sep="", end="")
        last = part
    console.print()
    if told := _told(last):
        console.print(Text(told, "dim"))


def _told(last: AnswerPart) -> str:
    """Of the end of an answer: the versions that made it."""
    versions = sorted(set(last.versions))
    parts = [f"version {' to '.join(map(str, versions))}"] if versions else []
    return ", ".join([*parts, *filter(None, [_ENDS.get(last.finish, "")])])
