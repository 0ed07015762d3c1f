"""Makes clients' streams from a seed: valid ones, and mutated ones that may be anything."""

import itertools
import random
from typing import Final

from msgspec import Struct, field

from tests.http_fuzz.corpus import CORPUS

_METHODS: Final = (b"GET", b"POST", b"POST", b"POST", b"PUT", b"HEAD", b"DELETE", b"OPTIONS", b"PATCH")
_PATHS: Final = (
    b"/", b"/v1/completions", b"/v1/chat/completions", b"/v1/files", b"/v1/models?limit=2",
    b"/odd%2Fpath//x?b=2&a=%20;c",
)  # fmt: skip
_HOSTS: Final = (b"a", b"a.example:81", b"[::1]:8100", b"127.0.0.1")
_VALUES: Final = (
    b"", b"1", b"a, b", b"v  w", b'"quoted; text"', b"\xc3\xa9\xff", b"x" * 300, b"chunked", b"close", b"0",
)  # fmt: skip
_NAMES: Final = (
    b"X-A", b"x-b", b"Cookie", b"Accept", b"Authorization", b"Content-Type", b"X_Under", b"Via", b"!#$%&'*+-.^`|~",
)  # fmt: skip
_CONNECTION: Final = (
    b"Connection: keep-alive\r\n", b"Connection: X-A, x-b\r\n", b"Connection: keep-alive, Host, Authorization\r\n",
    b"TE: trailers\r\n", b"Trailer: X-A\r\n", b"Keep-Alive: timeout=5\r\n", b"Proxy-Connection: keep-alive\r\n",
    b"Expect: 100-continue\r\n", b"Proxy-Authorization: Basic x\r\n",
)  # fmt: skip
_EXTENSIONS: Final = (b";a", b";a=b", b';name="quoted; text"', b";a=b;c=d", b";" + b"n" * 200)
_TRAILERS: Final = (
    b"X-Checksum: 1\r\n", b"Host: evil\r\n", b"X-A: from-the-trailer\r\n", b"Authorization: Bearer other\r\n",
    b"TE: gzip\r\n", b"Expect: 100-continue\r\n",
)  # fmt: skip
#: What mutations put in.
_TOKENS: Final = (
    b"\r\n", b"\n", b"\r", b"\0", b" ", b"\t", b":", b";", b",", b"\r\n\r\n", b"0\r\n\r\n", b"\x7f", b"\xff",
    b"%0d%0a", b"#", b"@", b"Transfer-Encoding: chunked\r\n", b"Transfer-Encoding: identity\r\n",
    b"Transfer-Encoding:\x0bchunked\r\n", b"transfer-encoding: Chunked, identity\r\n", b"Content-Length: 5\r\n",
    b"Content-Length: 0\r\n", b"content-length: +5\r\n", b"Content-Length : 5\r\n", b"Content-Length: 5, 5\r\n",
    b"Content-Length: 0x5\r\n", b"Content-Length: 18446744073709551617\r\n", b" folded: 1\r\n", b"X: a\r\n b\r\n",
    b"Host: b\r\n", b"Connection: close\r\n", b"Connection: Upgrade\r\nUpgrade: h2c\r\n", b"Expect: 100-continue\r\n",
    b"GET /smuggled HTTP/1.1\r\nHost: a\r\n\r\n", b"http://evil", b" HTTP/1.0", b"HTTP/1.1", b"-1", b"ffffffff",
)  # fmt: skip


class RequestStream(Struct):
    """What one client sends, in these pieces."""

    pieces: list[bytes] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)
    passed: int | None = None  # so many requests must pass; None: it may be any number
    refused: bool = False  # whether the next one must be refused

    @property
    def whole(self) -> bytes:
        return b"".join(self.pieces)


def request_stream(rng: random.Random) -> RequestStream:
    """One client's stream. The same state of `rng` makes the same stream."""
    made = RequestStream()
    if rng.random() < 0.1:
        entry = rng.choice(CORPUS)
        made.kinds.append("corpus")
        stream, made.passed, made.refused = entry.stream, entry.passed, entry.refused
    else:
        made.passed = count = rng.choice((1, 1, 1, 2, 2, 3, 8, 20))
        made.kinds += ["pipelined"] * (count > 1)
        stream = b"".join([_request(rng, made.kinds, index, last=index == count - 1) for index in range(count)])
    if rng.random() < 0.5:
        made.kinds.append("mutated")
        made.passed, made.refused = None, False
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            stream = _mutated(rng, stream)
    made.pieces = _cut(rng, stream, made.kinds)
    return made


def _request(rng: random.Random, kinds: list[str], index: int, *, last: bool) -> bytes:
    old = last and rng.random() < 0.05
    method, target, host = rng.choice(_METHODS), rng.choice(_PATHS), rng.choice(_HOSTS)
    if rng.random() < 0.1:
        kinds.append("absolute")
        target = (
            rng.choice((b"http://", b"HTTPS://")) + rng.choice(_HOSTS) + rng.choice((target, b"", b"?to=/v1/files"))
        )
    head = b"\r\n" * rng.choice((0, 0, 0, 0, 1, 3)) + b"%b %b HTTP/1.%d\r\n" % (method, target, not old)
    lines = [
        b"%b:%b%b%b\r\n" % (rng.choice(_NAMES), *_spaced(rng, rng.choice(_VALUES))) for _ in range(rng.randrange(5))
    ]
    lines += [b"Host: %b\r\n" % host] * (not old or rng.random() < 0.5)
    lines += rng.sample(_CONNECTION, rng.choice((0, 0, 1, 2)))
    lines += [b"X-Index: %d\r\n" % index]
    if last and rng.random() < 0.1:
        kinds.append("close")
        lines += [b"Connection: close\r\n"]
    framing, body = _body(rng, kinds, may_chunk=not old) if method != b"GET" or rng.random() < 0.1 else (b"", b"")
    lines += [framing] if framing else []
    rng.shuffle(lines)
    return head + b"".join(lines) + b"\r\n" + body


def _spaced(rng: random.Random, value: bytes) -> tuple[bytes, bytes, bytes]:
    return rng.choice((b" ", b" ", b"", b"\t", b"  ")), value, rng.choice((b"", b"", b"", b" ", b"\t "))


def _body(rng: random.Random, kinds: list[str], *, may_chunk: bool) -> tuple[bytes, bytes]:
    """The header and the bytes of a body."""
    size = rng.choice((0, 1, 2, 15, 200, 200, 3000, 70_000 if rng.random() < 0.05 else 10))
    content = b'{"stream":true}' if size == 15 else rng.randbytes(size)
    if not may_chunk or rng.random() < 0.4:
        return b"Content-Length: %d\r\n" % size, content
    kinds.append("chunked")
    most = rng.choice((1, 2, 100, 1 << 16)) if size <= 3000 else 1 << 15
    out: list[bytes] = []
    at = 0
    extended, padded = rng.random() < 0.2, rng.random() < 0.1
    kinds += ["tiny chunks"] * (most <= 2 and size > 100) + ["extensions"] * extended
    while at < size:
        part = content[at : at + rng.randint(1, most)]
        at += len(part)
        extension = rng.choice(_EXTENSIONS if len(out) < 9 else _EXTENSIONS[:2]) if extended else b""
        out.append(rng.choice((b"%x", b"%X")) % len(part))
        out[-1] = b"000" * padded + out[-1] + extension + b"\r\n" + part + b"\r\n"
    trailers = rng.sample(_TRAILERS, rng.choice((0, 0, 1, 2)))
    kinds += ["trailers"] * bool(trailers)
    return rng.choice((b"Transfer-Encoding: chunked\r\n", b"transfer-encoding:Chunked\r\n")), b"".join(
        [*out, b"0\r\n", *trailers, b"\r\n"]
    )


def _mutated(rng: random.Random, stream: bytes) -> bytes:
    at = rng.randrange(len(stream) + 1)
    if rng.random() < 0.5:  # at a line's border, where most of the grammar is
        borders = [0, *(number + 2 for number in range(len(stream) - 1) if stream[number : number + 2] == b"\r\n")]
        at = rng.choice(borders)
    end = min(len(stream), at + rng.choice((1, 1, 2, 5, 40)))
    match rng.randrange(7):
        case 0:
            return stream[:at] + bytes([rng.randrange(256)]) + stream[at + 1 :]
        case 1:
            return stream[:at] + stream[end:]
        case 2:
            return stream[:end] + stream[at:]
        case 3:
            return stream[:at]
        case 4:
            return stream[:at] + rng.choice(CORPUS).stream + stream[at:]
        case _:
            return stream[:at] + rng.choice(_TOKENS) + stream[at:]


def _cut(rng: random.Random, stream: bytes, kinds: list[str]) -> list[bytes]:
    """In one piece, in a few, or byte by byte."""
    if not stream:
        return []
    cuts = rng.choice((0, 0, 1, 2, 5, 20, len(stream) if len(stream) < 250 else 3))
    kinds += ["byte by byte"] * (cuts == len(stream))
    places = sorted({0, len(stream), *(rng.randrange(len(stream) + 1) for _ in range(cuts))})
    if cuts == len(stream):
        places = list(range(len(stream) + 1))
    return [stream[first:last] for first, last in itertools.pairwise(places)]
