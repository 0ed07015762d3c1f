"""Checks and rewrites the heads of requests and answers, and makes the proxy's own answers.

A hop-by-hop header (RFC 9110, 7.6.1) is not passed on. The proxy writes the length of a body itself and copies none, so
both sides always agree where a message ends.
"""

import re
from collections.abc import Iterable, Sequence
from http import HTTPStatus
from typing import Final

import msgspec
from msgspec import Struct

Header = tuple[bytes, bytes]

_HOP: Final = frozenset(
    {
        b"connection", b"keep-alive", b"proxy-connection", b"proxy-authorization", b"te", b"trailer", b"upgrade",
        b"transfer-encoding", b"http2-settings",
    }
)  # fmt: skip
#: Headers of a request that are not passed on: the proxy writes the length, and answers an expectation itself.
_NOT_FORWARDED: Final = _HOP | {b"content-length", b"expect"}
#: Headers of a request that decide whether it may pass.
_CHECKED: Final = frozenset({b"host", b"content-length", b"transfer-encoding", b"upgrade", b"expect"})
#: An http URL: its host, and what follows.
_URL: Final = re.compile(rb"(?i:https?)://([^/?@]+)([/?].*)?")
#: Headers that a `Connection` header cannot remove.
_KEPT: Final = frozenset({b"host", b"content-length", b"content-type", b"authorization"})


class HeadRefused(Exception):
    """The proxy refuses a request: status, message and OpenAI's type of error."""

    def __init__(self, status: int, message: str, kind: str = "invalid_request_error") -> None:
        super().__init__(message)
        self.status, self.message, self.kind = status, message, kind


class RequestHead(Struct, frozen=True):
    """The head of a request that may pass."""

    method: bytes
    target: bytes
    lines: bytes  # the headers that are passed on, as they are sent
    modern: bool  # HTTP/1.1, not 1.0
    keep_alive: bool
    has_body: bool
    length: int | None  # of the body; None: it comes in chunks, or there is none
    expects: bool

    def forwarded(self, framing: bytes) -> bytes:
        """The head for the engine; `framing` is the header with the body's length, or empty."""
        end = framing + b"\r\n\r\n" if framing else b"\r\n"
        return b"%b %b HTTP/1.1\r\n%b%b" % (self.method, self.target, self.lines, end)


def read_head(
    method: bytes, target: bytes, headers: list[Header], version: str, *, keep_alive: bool, upgrades: bool
) -> RequestHead:
    """Check a request's head. Raises `HeadRefused` for anything that two hosts could read in different ways.

    `keep_alive`: another request may follow. `upgrades`: the request asks for another protocol.
    """
    if version not in {"1.0", "1.1"}:
        raise HeadRefused(505, f"HTTP/{version} is not supported; use HTTP/1.1")
    seen: dict[bytes, list[bytes]] = {}
    for name, value in headers:
        if b"\n" in value or b"\r" in value or b"\0" in value:
            raise HeadRefused(400, f"the header {name.decode('latin-1')} spans lines, or holds control characters")
        lower = name.lower()
        if lower in _CHECKED:
            seen.setdefault(lower, []).append(value)
    modern = version == "1.1"
    hosts = seen.get(b"host", [])
    if len(hosts) > 1 or (modern and not hosts):
        raise HeadRefused(400, "there must be one Host header")
    _refuse_upgrades(method, seen)
    length, chunked = _framing(seen, modern=modern)
    if upgrades and (chunked or length):  # the parser would skip it
        raise HeadRefused(501, "a request with a body cannot change the protocol; leave out Upgrade")
    host, target = origin_form(target)
    if host or not hosts:  # HTTP/1.0 may lack it, while the engine gets 1.1
        own = [(b"Host", host or b"localhost")]
        headers = own + [(name, value) for name, value in headers if name.lower() != b"host"]
    lines = b"".join([line + b"\r\n" for line in _lines(headers, _NOT_FORWARDED)])
    expects = modern and b"100-continue" in [value.lower() for value in seen.get(b"expect", [])]
    has_body, keep_alive = chunked or length is not None, keep_alive and modern and not upgrades
    return RequestHead(method, target, lines, modern, keep_alive, has_body, length, expects)


def _framing(seen: dict[bytes, list[bytes]], *, modern: bool) -> tuple[int | None, bool]:
    lengths, codings = seen.get(b"content-length", []), seen.get(b"transfer-encoding", [])
    if lengths and codings:
        raise HeadRefused(400, "Content-Length and Transfer-Encoding exclude each other")
    if codings:
        if not modern or [value.strip().lower() for value in codings] != [b"chunked"]:
            raise HeadRefused(400, "the only supported Transfer-Encoding is chunked, in HTTP/1.1")
        return None, True
    if not lengths:
        return None, False
    if len(lengths) > 1 or not lengths[0].strip().isdigit() or len(lengths[0]) > 18:
        raise HeadRefused(400, "Content-Length must be one number")
    return int(lengths[0]), False


def _refuse_upgrades(method: bytes, seen: dict[bytes, list[bytes]]) -> None:
    if method == b"CONNECT":
        raise HeadRefused(501, "this is a proxy in front of one serving engine; CONNECT is not supported")
    if any(b"websocket" in value.lower() for value in seen.get(b"upgrade", [])):
        raise HeadRefused(
            501,
            'websockets do not pass the serving-guard; stream over HTTP ("stream": true), or reach the engine itself',
        )


def answer_head(status: int, reason: bytes, headers: Sequence[Header], extra: Iterable[bytes]) -> bytes:
    """The head for the client; `extra`: lines about this connection."""
    lines = [b"HTTP/1.1 %d %s" % (status, reason), *_lines(headers, _HOP), *extra, b"\r\n"]
    return b"\r\n".join(lines)


def _lines(headers: Sequence[Header], dropped: frozenset[bytes]) -> list[bytes]:
    lowered = [(name.lower(), name, value) for name, value in headers]
    for lower, _, value in lowered:
        if lower == b"connection" and value.lower() not in {b"keep-alive", b"close"}:
            named = {word.strip() for word in value.lower().split(b",")}
            dropped |= named - _KEPT
    return [name + b": " + value for lower, name, value in lowered if lower not in dropped]


def value_of(headers: Iterable[Header], wanted: bytes) -> bytes:
    """The first value of a header, in lower case; empty: there is none."""
    return next((value.lower() for name, value in headers if name.lower() == wanted), b"")


def path_of(target: bytes) -> bytes:
    return target.partition(b"?")[0]


def origin_form(target: bytes) -> tuple[bytes, bytes]:
    """The host that a URL names (empty: the target is a path), and the target without it (RFC 9112, 3.2.2).

    Raises `HeadRefused` for any other form, and for a fragment, which hosts treat in different ways.
    """
    if b"#" in target:
        raise HeadRefused(400, "the target has a fragment; leave out '#' and what follows")
    if target.startswith(b"/") or target == b"*":
        return b"", target
    parts = _URL.fullmatch(target)
    if parts is None:
        raise HeadRefused(400, "the target is neither a path nor an http URL")
    host, rest = parts.groups(b"")
    return host, rest if rest.startswith(b"/") else b"/" + rest


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def failure(status: int, message: str, kind: str, *, close: bool, body: bool = True) -> bytes:
    """A complete answer of the proxy itself, in the form of OpenAI's errors."""
    text = msgspec.json.encode({"error": {"message": message, "type": kind, "param": None, "code": status}})
    return plain(status, text, close=close, body=body)


def plain(status: int, text: bytes, *, close: bool, body: bool = True) -> bytes:
    """A complete answer of the proxy itself, in JSON."""
    extra = [b"Content-Type: application/json", b"Content-Length: %d" % len(text)]
    if close:
        extra.append(b"Connection: close")
    head = answer_head(status, HTTPStatus(status).phrase.encode(), (), extra)
    return head + text if body else head
