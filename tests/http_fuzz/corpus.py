"""Streams of clients that parsers are known to read in different ways, each with what must become of it."""

from typing import Final

from msgspec import Struct

_GET: Final = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"
_POST: Final = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\n"
_UPGRADE: Final = b"Connection: Upgrade\r\nUpgrade: h2c\r\n"
_CHUNKED: Final = _POST + b"Transfer-Encoding: chunked\r\n\r\n"


class Specimen(Struct, frozen=True):
    name: str
    stream: bytes
    passed: int = 0  # requests that the proxy must pass on
    refused: bool = True  # whether it must refuse the next one


def _passes(name: str, stream: bytes, count: int = 1) -> Specimen:
    return Specimen(name, stream, count, refused=False)


CORPUS: Final = (
    _passes("plain", _GET),
    _passes("pipelined", _GET * 10, 10),
    _passes("trailers", _CHUNKED + b"2\r\n{}\r\n0\r\nHost: evil\r\nX-User: admin\r\nAuthorization: x\r\n\r\n"),
    _passes("trailers, pipelined", _GET + _CHUNKED + b"0\r\nX-User: admin\r\n\r\n" + _GET, 3),
    _passes("extensions", _CHUNKED + b'1;a\r\nx\r\n1;a=b;c="d;e"\r\ny\r\n0;last\r\n\r\n'),
    _passes("tiny chunks", _CHUNKED + b"1\r\nx\r\n" * 500 + b"0\r\n\r\n"),
    _passes("long chunk sizes", _CHUNKED + b"0000000002\r\nab\r\n000\r\n\r\n" + _GET, 2),
    _passes("empty lines", b"\r\n\r\n" + _GET + b"\r\n" + _GET, 2),
    _passes("empty header", b"GET / HTTP/1.1\r\nHost: a\r\nX:\r\nY: \t \r\n\r\n"),
    _passes("empty host", b"GET / HTTP/1.1\r\nHost:\r\n\r\n"),
    _passes("URL", b"GET http://b:1/x?y HTTP/1.1\r\nHost: a\r\n\r\n"),
    _passes("URL without a path", b"GET http://b?to=/x HTTP/1.1\r\nHost: a\r\n\r\n"),
    _passes("old", b"GET / HTTP/1.0\r\n\r\n"),
    _passes("old, with a body", b"POST / HTTP/1.0\r\nContent-Length: 2\r\n\r\nok"),
    _passes("close", b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"),
    _passes("expectation", _POST + b"Expect: 100-continue\r\nContent-Length: 2\r\n\r\n{}"),
    _passes("upgrade", b"GET / HTTP/1.1\r\nHost: a\r\n" + _UPGRADE + b"\r\n"),
    _passes("stripped", b"GET / HTTP/1.1\r\nHost: a\r\nConnection: X-A, Host\r\nX-A: 1\r\nTE: trailers\r\n\r\n"),
    Specimen("length and chunked", _POST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + _GET),
    Specimen("chunked and length", _POST + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n" + _GET),
    Specimen("two lengths", _POST + b"Content-Length: 0\r\nContent-Length: 27\r\n\r\n" + _GET),
    Specimen("equal lengths", _POST + b"Content-Length: 2\r\nContent-Length: 2\r\n\r\n{}" + _GET),
    Specimen("list of lengths", _POST + b"Content-Length: 2, 2\r\n\r\n{}" + _GET),
    Specimen("signed length", _POST + b"Content-Length: +2\r\n\r\n{}" + _GET),
    Specimen("huge length", _POST + b"Content-Length: 18446744073709551618\r\n\r\n{}" + _GET),
    Specimen("space before the colon", _POST + b"Content-Length : 2\r\n\r\n{}" + _GET),
    Specimen("coded", _POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n" + _GET),
    Specimen("twice coded", _POST + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: gzip\r\n\r\n0\r\n\r\n" + _GET),
    Specimen("hidden coding", _POST + b"Transfer-Encoding: \x0bchunked\r\n\r\n0\r\n\r\n" + _GET),
    Specimen("old and chunked", b"POST / HTTP/1.0\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + _GET),
    Specimen("folded", b"GET / HTTP/1.1\r\nHost: a\r\nX: a\r\n Content-Length: 27\r\n\r\n" + _GET),
    Specimen("folded first", b"GET / HTTP/1.1\r\n Host: a\r\nHost: a\r\n\r\n" + _GET),
    Specimen("line feeds", b"GET / HTTP/1.1\nHost: a\n\n" + _GET),
    Specimen("line feed in a head", b"GET / HTTP/1.1\r\nHost: a\nX: 1\r\n\r\n" + _GET),
    Specimen("return in a value", b"GET / HTTP/1.1\r\nHost: a\r\nX: a\rContent-Length: 27\r\n\r\n" + _GET),
    Specimen("zero in a value", b"GET / HTTP/1.1\r\nHost: a\r\nX: a\0b\r\n\r\n" + _GET),
    Specimen("two hosts", b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n" + _GET),
    Specimen("no host", b"GET / HTTP/1.1\r\n\r\n" + _GET),
    Specimen("user in a URL", b"GET http://user@b/ HTTP/1.1\r\nHost: b\r\n\r\n" + _GET),
    Specimen("fragment", b"GET /a#b HTTP/1.1\r\nHost: a\r\n\r\n" + _GET),
    Specimen("space in a target", b"GET /a b HTTP/1.1\r\nHost: a\r\n\r\n" + _GET),
    Specimen("tunnel", b"CONNECT b:443 HTTP/1.1\r\nHost: b:443\r\n\r\n" + _GET),
    Specimen("upgrade with a body", _POST + _UPGRADE + b"Content-Length: 2\r\n\r\n{}" + _GET),
    Specimen("HTTP/2", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _GET),
    Specimen("second refused", _GET + b"GET / HTTP/1.1\r\n\r\n" + _GET, 1),
    Specimen("chunk size", _CHUNKED + b"zz\r\n\r\n" + _GET),
    Specimen("negative chunk", _CHUNKED + b"-1\r\n\r\n" + _GET),
    Specimen("huge chunk", _CHUNKED + b"1ffffffffffffffff\r\n" + _GET),
    Specimen("chunk without its end", _CHUNKED + b"2\r\n{}0\r\n\r\n" + _GET),
    Specimen("chunk with line feeds", _CHUNKED + b"2\n{}\n0\n\n" + _GET),
    Specimen("line feed in an extension", _CHUNKED + b"2;a\nb\r\n{}\r\n0\r\n\r\n" + _GET),
    Specimen("return in an extension", _CHUNKED + b"2;a\rb\r\n{}\r\n0\r\n\r\n" + _GET),
    Specimen("framing in trailers", _CHUNKED + b"0\r\nContent-Length: 27\r\n\r\n" + _GET),
    Specimen("folded trailer", _CHUNKED + b"0\r\nX: a\r\n b\r\n\r\n" + _GET),
)  # fmt: skip
