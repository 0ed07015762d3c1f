"""Whatever a client sends, the proxy and an independent parser read the same messages; and the cases can tell."""

import asyncio
import random
from collections.abc import Iterator

import msgspec
import pytest

from ebbtide.serving_guard.proxy import clients, engine_connections, http_heads, request_exchange
from tests.http_fuzz import http_case
from tests.http_fuzz.__main__ import main
from tests.http_fuzz.corpus import CORPUS
from tests.http_fuzz.http_case import CaseResult, fuzz_stand
from tests.http_fuzz.request_streams import RequestStream
from tests.integration.serving_guard.stand import on_uvloop

#: An early or broken answer excuses much, so specimens are answered as this seed's first request is.
_PLAIN_SEED = 78


@on_uvloop
async def test_each_specimen_passes_or_is_refused_as_it_must_be_in_one_piece_and_byte_by_byte() -> None:
    async with fuzz_stand() as stand:
        for specimen in CORPUS:
            whole = specimen.stream
            for pieces in ([whole], [whole[at : at + 1] for at in range(len(whole))]):
                stream = RequestStream(pieces, passed=specimen.passed, refused=specimen.refused)
                result = await stand.send(stream, random.Random(_PLAIN_SEED), _PLAIN_SEED)
                assert not result.wrong, specimen.name


@on_uvloop
async def test_both_ends_agree_on_every_message_of_three_hundred_cases() -> None:
    kinds: set[str] = set()
    async with fuzz_stand() as stand:
        for seed in range(300):
            result = await stand.run(seed)
            assert not result.wrong, f"python -m tests.http_fuzz --first {seed} --cases 1"
            kinds |= set(result.kinds)
    assert kinds >= {
        "trailers", "extensions", "tiny chunks", "pipelined", "early answer", "absolute", "corpus", "mutated",
        "broken answer", "byte by byte", "close",
    }  # fmt: skip


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_both_ends_agree_on_every_message_of_a_hundred_thousand_cases() -> None:
    assert main(["--cases", "100000", "--jobs", "2"]) == 0


class Mistakes:
    """Each method plants a mistake of the proxy."""

    @staticmethod
    def trailers_become_headers(patch: pytest.MonkeyPatch) -> None:
        former = clients.ClientConnection.on_header

        def on_header(self: clients.ClientConnection, name: bytes, value: bytes) -> None:
            if isinstance(self._incoming, request_exchange.RequestExchange):
                head = self._incoming.head
                msgspec.structs.force_setattr(head, "lines", head.lines + name + b": " + value + b"\r\n")
            former(self, name, value)

        patch.setattr(clients.ClientConnection, "on_header", on_header)

    @staticmethod
    def a_post_is_sent_twice(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(request_exchange, "_IDEMPOTENT", request_exchange._IDEMPOTENT | {b"POST", b"PATCH"})

    @staticmethod
    def a_url_keeps_the_former_host(patch: pytest.MonkeyPatch) -> None:
        former = http_heads.origin_form
        patch.setattr(http_heads, "origin_form", lambda target: (b"", former(target)[1]))

    @staticmethod
    def headers_of_the_connection_pass(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(http_heads, "_NOT_FORWARDED", frozenset({b"content-length", b"transfer-encoding"}))

    @staticmethod
    def a_half_read_connection_is_used_again(patch: pytest.MonkeyPatch) -> None:
        former = engine_connections.EngineConnection.release

        def release(self: engine_connections.EngineConnection, *, reusable: bool) -> None:
            former(self, reusable=True)

        patch.setattr(engine_connections.EngineConnection, "release", release)

    @staticmethod
    def a_body_never_ends(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(http_case, "HANG_S", 1.0)
        patch.setattr(request_exchange.RequestExchange, "complete", lambda self: None)

    @staticmethod
    def all_is_held(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(request_exchange.RequestExchange, "flush", lambda self: None)
        patch.setattr(http_case, "_MOST_HELD", 2 << 10)


MISTAKES = [name for name in vars(Mistakes) if not name.startswith("_")]


@pytest.fixture
def planted(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch:
        getattr(Mistakes, request.param)(patch)
        yield


@pytest.mark.parametrize("planted", MISTAKES, indirect=True)
@pytest.mark.usefixtures("planted")
@on_uvloop
async def test_a_mistake_of_the_proxy_is_found() -> None:
    async def first_wrong() -> CaseResult | None:
        async with fuzz_stand() as stand:
            for seed in range(600):
                if (result := await stand.run(seed)).wrong:
                    return result
        return None

    assert await asyncio.wait_for(first_wrong(), 60) is not None
