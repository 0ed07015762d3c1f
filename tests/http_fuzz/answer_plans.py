"""Plans how an imitated engine answers a request: its bytes, how they are cut, and when it closes the connection."""

import itertools
import random
from typing import Final

from msgspec import Struct

from tests.http_fuzz.http_reader import HttpMessage

_STATUSES: Final = (200, 200, 200, 201, 204, 304, 400, 404, 418, 500, 503)
_LINES: Final = (
    b"Content-Type: application/json\r\n", b"Content-Type: text/event-stream\r\n", b"X-A: 1\r\n", b"X-A: 2\r\n",
    b"Set-Cookie: \r\n", b"Keep-Alive: timeout=5\r\n", b"Connection: X-A\r\n", b"Server:  x  y \r\n",
    b"Trailer: X-A\r\n", b"X-Obs: \xe9\r\n",
)  # fmt: skip
#: Answers that are no HTTP, or that two clients could read in two ways.
_BROKEN: Final = (
    b"\r\n", b"HTTP/1.1 200 OK\r\nConte", b"SSH-2.0-OpenSSH\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nabc",
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nab",
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\nabc",
    b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nabHTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\ncd",
    b"HTTP/1.1 200 OK\r\nX: a\r\n b\r\nContent-Length: 0\r\n\r\n", b"HTTP/1.1 101 Switching Protocols\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nX-A: trailer\r\n", b"HTTP/1.1 20 OK\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nX: a\0b\r\nContent-Length: 0\r\n\r\n",
)  # fmt: skip


class AnswerPlan(Struct):
    """`pieces` are written one by one. The connection is closed then if `closes`."""

    kind: str
    pieces: list[bytes]
    closes: bool = False
    early: bool = False  # whether it is answered when its head is here

    @property
    def whole(self) -> bytes:
        return b"".join(self.pieces)


def answer_plan(rng: random.Random, request: HttpMessage) -> AnswerPlan:
    """The plan for this request. The same state of `rng` makes the same plan for the same method."""
    early = rng.random() < 0.1
    if rng.random() < 0.1:
        broken = rng.choice(_BROKEN) if rng.random() < 0.8 else b""
        return AnswerPlan("broken answer", [broken], closes=True, early=early)
    status, size = rng.choice(_STATUSES), rng.choice((0, 1, 20, 20, 500, 5000))
    bodiless = status in {204, 304}
    lines = rng.sample(_LINES, rng.randrange(4))
    content, closes = rng.randbytes(size), rng.random() < 0.1
    framing, body = _framed(rng, content)
    if bodiless:
        framing, body = rng.choice((b"", b"Content-Length: 5\r\n")) if status == 304 else b"", b""
    elif request.start[0] == b"HEAD":
        body = b""
    closes = closes or not (framing or bodiless)
    lines += [b"X-Engine: 1\r\n"] + ([framing] if framing else [])
    lines += [b"Connection: close\r\n"] * closes
    rng.shuffle(lines)
    interim = b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" * (rng.random() < 0.1)
    head = interim + b"HTTP/1.1 %d %b\r\n" % (status, rng.choice((b"OK", b"", b"Short And Stout")))
    whole = head + b"".join(lines) + b"\r\n" + body
    return AnswerPlan("early answer" if early else "answer", _pieces(rng, whole), closes=closes, early=early)


def _framed(rng: random.Random, content: bytes) -> tuple[bytes, bytes]:
    match rng.randrange(4):
        case 0:
            return b"", content
        case 1:
            return b"Content-Length: %d\r\n" % len(content), content
        case _:
            most = rng.choice((1, 50, 10_000)) if len(content) <= 500 else 10_000
            out = []
            while content:
                part, content = content[:most], content[most:]
                extension = b";a=b" * (rng.random() < 0.1)
                out.append(b"%x%b\r\n%b\r\n" % (len(part), extension, part))
            trailers = b"X-A: trailer\r\nContent-Type: none\r\n" * (rng.random() < 0.2)
            return b"Transfer-Encoding: chunked\r\n", b"".join([*out, b"0\r\n", trailers, b"\r\n"])


def _pieces(rng: random.Random, whole: bytes) -> list[bytes]:
    cuts = sorted({0, len(whole), *(rng.randrange(len(whole) + 1) for _ in range(rng.choice((0, 0, 1, 3))))})
    return [whole[first:last] for first, last in itertools.pairwise(cuts)]
