"""Reads requests and answers by h11, a parser that shares no code with the proxy's, and says what a proxy passes on.

The rules of `passed_on` are written from RFC 9110 and 9112, and not taken from the proxy.
"""

import re
from collections.abc import Sequence
from typing import Final

import h11
from msgspec import Struct, field

Headers = list[tuple[bytes, bytes]]

#: Longer than any head or line that cases have.
_LONGEST: Final = 1 << 20
#: A proxy keeps these, and those that `Connection` names, for itself (RFC 9110, 7.6.1).
_OF_THE_CONNECTION: Final = frozenset(
    {
        b"connection", b"keep-alive", b"proxy-connection", b"proxy-authorization", b"te", b"trailer", b"upgrade",
        b"transfer-encoding", b"http2-settings", b"expect", b"content-length",
    }
)  # fmt: skip
#: `Connection` removes none of these: the request would be another one.
_END_TO_END: Final = frozenset({b"host", b"content-length", b"content-type", b"authorization"})
#: A request's first line.
_SPACED: Final = re.compile(rb"\A(\S+) +(\S+) +(HTTP/\d\.\d\r\n)")


class HttpMessage(Struct):
    """A request or an answer. `start` is method and target, or the status."""

    start: tuple[bytes, ...]
    headers: Headers
    body: bytearray = field(default_factory=bytearray)
    complete: bool = False
    old: bool = False  # HTTP/1.0

    def header(self, name: bytes) -> bytes:
        return next((value for own, value in self.headers if own == name), b"")

    def passed_on(self) -> "HttpMessage":
        """The message behind a proxy: in origin form, without headers of the connection and of the framing."""
        headers = _end_to_end(self.headers)
        start = self.start
        if len(start) == 2:
            host, target = _origin(start[1])
            start = (start[0], target)
            if host or all(name != b"host" for name, _ in headers):  # an empty one is valid
                headers = [(b"host", host or b"localhost"), *((n, v) for n, v in headers if n != b"host")]
        return HttpMessage(start, sorted(headers, key=lambda one: one[0]), self.body, self.complete)


def _end_to_end(headers: Headers) -> Headers:
    named = {
        word.strip() for name, value in headers if name == b"connection" for word in value.lower().split(b",")
    } - _END_TO_END
    return [(name, value) for name, value in headers if name not in _OF_THE_CONNECTION | named]


def _origin(target: bytes) -> tuple[bytes, bytes]:
    for scheme in (b"http://", b"https://"):
        if target[: len(scheme)].lower() == scheme:
            rest = target[len(scheme) :]
            end = min([rest.find(mark) for mark in (b"/", b"?") if mark in rest], default=len(rest))
            path = rest[end:]
            return rest[:end], path if path.startswith(b"/") else b"/" + path
    return b"", target


class RequestReader:
    """Reads a client's stream as a server does.

    `lenient`: as RFC 9112 allows and the proxy does, but h11 does not. Empty lines before a request are ignored (2.2),
    and there may be several spaces in its first line (3). The proxy passes neither on.
    """

    def __init__(self, *, lenient: bool = False) -> None:
        self.messages: list[HttpMessage] = []
        self.error = ""
        self.ended = False  # the last request asked for the connection's end
        self._lenient = lenient
        self._connection = h11.Connection(h11.SERVER, max_incomplete_event_size=_LONGEST)
        self._waiting = b""  # bytes that may be empty lines before a request

    @property
    def between(self) -> bool:
        """Whether no request is half read."""
        return (not self.messages or self.messages[-1].complete) and not self._connection.trailing_data[0]

    def feed(self, data: bytes) -> list[HttpMessage]:
        """Read on; the messages that began or became complete."""
        touched: list[HttpMessage] = []
        self._waiting += data
        while not (self.error or self.ended):
            if self._lenient and self.between:
                self._waiting = _SPACED.sub(rb"\1 \2 \3", self._waiting.lstrip(b"\r\n"), count=1)
            given, self._waiting = self._waiting, b""
            try:
                if given:
                    self._connection.receive_data(given)
                if not self._events(touched):
                    break
            except h11.RemoteProtocolError as error:
                self.error = str(error)
        return touched

    def _events(self, touched: list[HttpMessage]) -> bool:
        """Take events; whether another request may follow in the bytes that are there."""
        while True:
            event = self._connection.next_event()
            if isinstance(event, h11.Request):
                old = event.http_version < b"1.1"
                self.messages.append(HttpMessage((event.method, event.target), list(event.headers), old=old))
                touched.append(self.messages[-1])
            elif isinstance(event, h11.Data):
                self.messages[-1].body += event.data
            elif isinstance(event, h11.EndOfMessage):
                self.messages[-1].complete = True
                if not touched or touched[-1] is not self.messages[-1]:
                    touched.append(self.messages[-1])
                return self._next()
            else:
                return False

    def _next(self) -> bool:
        """Answer for h11, which reads no further request before."""
        connection = self._connection
        connection.send(h11.Response(status_code=404, headers=[(b"content-length", b"0")]))
        connection.send(h11.EndOfMessage())
        if connection.our_state is not h11.DONE or connection.their_state is not h11.DONE:
            self.ended = True
            return False
        rest = connection.trailing_data[0]
        self._connection = h11.Connection(h11.SERVER, max_incomplete_event_size=_LONGEST)
        self._waiting = rest + self._waiting
        return bool(self._waiting)


class AnswerReader:
    """Reads an engine's or a proxy's stream as a client does that sent requests by these methods, in this order."""

    def __init__(self, methods: Sequence[bytes]) -> None:
        self.messages: list[HttpMessage] = []
        self.error = ""
        self.ended = False  # the stream ended, or an answer said that it ends here
        self._methods = iter(methods)
        self._connection = self._begun()

    def _begun(self) -> h11.Connection:
        connection = h11.Connection(h11.CLIENT, max_incomplete_event_size=_LONGEST)
        method = next(self._methods, b"GET")
        connection.send(h11.Request(method=method, target=b"/", headers=[(b"host", b"a")]))
        connection.send(h11.EndOfMessage())
        return connection

    def feed(self, data: bytes) -> None:
        """Read on; empty: the stream has ended."""
        if self.ended or self.error:
            return
        self.ended = not data
        try:
            if data or not self.between:
                self._connection.receive_data(data)
                self._events()
        except h11.RemoteProtocolError as error:
            self.error = "" if self.ended else str(error)  # a stream may end amid an answer

    @property
    def between(self) -> bool:
        return (not self.messages or self.messages[-1].complete) and not self._connection.trailing_data[0]

    def _events(self) -> None:
        while True:
            event = self._connection.next_event()
            if isinstance(event, h11.Response):
                self.messages.append(HttpMessage((b"%d" % event.status_code,), list(event.headers)))
            elif isinstance(event, h11.Data):
                self.messages[-1].body += event.data
            elif isinstance(event, h11.EndOfMessage):
                self.messages[-1].complete = True
                if self._connection.their_state is not h11.DONE:
                    self.ended = True
                    return
                rest = self._connection.trailing_data[0]
                self._connection = self._begun()
                if not rest:
                    return
                self._connection.receive_data(rest)
            elif not isinstance(event, h11.InformationalResponse):
                return


def read_requests(stream: bytes) -> RequestReader:
    """Read a whole client's stream."""
    reader = RequestReader(lenient=True)
    reader.feed(stream)
    return reader


def read_answer(stream: bytes, method: bytes, *, ended: bool) -> HttpMessage | None:
    """The first answer in an engine's stream; None: there is none that h11 understands."""
    reader = AnswerReader([method])
    reader.feed(stream)
    if ended:
        reader.feed(b"")
    first = next(iter(reader.messages), None)
    return None if first is None or (reader.error and not first.complete) else first
