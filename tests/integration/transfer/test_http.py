"""Static copies behind web servers: good ones, and those that do not keep to what was asked."""

import struct
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from ebbtide.errors import ChunkCorrupt, Unavailable, VersionUnavailable
from ebbtide.transfer import Mirror
from ebbtide.transfer.static_source import BlobSpan, StaticIndex, StaticSource, spans
from ebbtide.types.weights import BlobSource
from ebbtide.weights.static_index import HEAD, RECORD
from tests.integration.transfer.conftest import needed
from tests.integration.transfer.test_puller import NEWEST, pull
from tests.unit.transfer.filling import assert_right
from tests.unit.weights.chain import Link

Handler = Callable[[web.Request], Any]


def write(folder: Path, blobs: dict[bytes, bytes], *, gap: int = 0, files: int = 1) -> None:
    """A static copy of blobs, with some bytes between them."""
    folder.mkdir(exist_ok=True)
    records, data = [], [bytearray() for _ in range(files)]
    for at, (digest, blob) in enumerate(blobs.items()):
        file = at * files // len(blobs)
        records.append((digest, len(blob), file, len(data[file])))
        data[file] += blob + bytes(gap)
    for number, content in enumerate(data):
        (folder / f"{number:05d}.blobs").write_bytes(content)
    index = HEAD + b"".join(RECORD.pack(*record) for record in sorted(records))
    (folder / "index").write_bytes(index)


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[tuple[str, Path, list[web.Request], dict[str, Handler]]]:
    """A web server's URL, its folder, the requests that it got, and handlers that take the place of files."""
    folder = tmp_path / "copy"
    asked: list[web.Request] = []
    instead: dict[str, Handler] = {}
    folder.mkdir()

    async def answer(request: web.Request) -> web.StreamResponse:
        asked.append(request)
        name = request.match_info["name"]
        if name in instead:
            made: web.StreamResponse = await instead[name](request)
            return made
        path = folder / name
        return web.FileResponse(path) if path.exists() else web.Response(status=404)

    app = web.Application()
    app.router.add_get("/v/{name}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    server = web.TCPSite(runner, "127.0.0.1", 0)
    await server.start()
    port = runner.addresses[0][1]
    yield f"http://127.0.0.1:{port}/v", folder, asked, instead
    await runner.cleanup()


async def read(url: str, digests: list[bytes]) -> dict[bytes, bytes]:
    source = StaticSource(url)
    try:
        return {digest: data async for digest, data in source.tiles(digests)}
    finally:
        await source.close()


@pytest.mark.parametrize(("gap", "files"), [(0, 1), (100, 3), (40_000, 2)])
async def test_blobs_come_by_ranges(links: list[Link], site: Any, gap: int, files: int) -> None:
    url, folder, asked, _ = site
    blobs = dict(sorted(links[4].blobs.items(), key=lambda item: item[1]))
    write(folder, blobs, gap=gap, files=files)
    assert await read(url, list(blobs)) == blobs
    requests = len([request for request in asked if request.path.endswith(".blobs")])
    assert requests == (files if gap < 1000 else len(blobs)), "neighbours come by one request"
    assert await read(url, list(blobs)[::-7]) == dict(list(blobs.items())[::-7])


async def test_a_pull_takes_tiles_from_a_static_copy(links: list[Link], site: Any, serve: Any, pullers: Any) -> None:
    url, folder, asked, _ = site
    write(folder, links[4].blobs)
    relay = await serve(links)
    relay.script.ways = [NEWEST]
    relay.script.sources = [BlobSource(name="copy", address=url, site="here", static=True)]
    mirror = Mirror(links[0].manifest, None)
    done = await pull(pullers(relay), mirror, links[4])
    assert_right(mirror, links[4])
    assert done.bytes_by_source == {"copy": needed(links, NEWEST)}
    assert asked


async def test_a_url_that_a_holder_told_is_never_asked(links: list[Link], site: Any, serve: Any, pullers: Any) -> None:
    url, folder, asked, _ = site
    write(folder, links[4].blobs)
    relay = await serve(links)
    relay.script.ways = [NEWEST]
    relay.script.sources = [BlobSource(name="w1", address=url, site="here")]
    mirror = Mirror(links[0].manifest, None)
    done = await pull(pullers(relay), mirror, links[4])
    assert_right(mirror, links[4])
    assert set(done.bytes_by_source) == {"weight-relay"}
    assert not asked


async def test_a_copy_that_has_grown_is_looked_at_again(links: list[Link], site: Any) -> None:
    url, folder, asked, _ = site
    write(folder, links[0].blobs)
    source = StaticSource(url)
    assert len([digest async for digest, _ in source.tiles(list(links[0].blobs))]) == len(links[0].blobs)
    write(folder, links[1].blobs)
    assert len([digest async for digest, _ in source.tiles(list(links[1].blobs))]) == len(links[1].blobs)
    with pytest.raises(VersionUnavailable):
        await anext(source.tiles([bytes(32)]))
    await source.close()
    assert len([request for request in asked if request.path.endswith("index")]) == 3


async def whole_file(request: web.Request) -> web.StreamResponse:
    return web.Response(body=b"x" * 100_000)


async def another_range(request: web.Request) -> web.StreamResponse:
    return web.Response(status=206, headers={"Content-Range": "bytes 5-10/99"}, body=b"x" * 6)


async def cut_short(request: web.Request) -> web.StreamResponse:
    first, last = request.headers["Range"].removeprefix("bytes=").split("-")
    return web.Response(status=206, headers={"Content-Range": f"bytes {first}-{last}/999999"}, body=b"x")


async def elsewhere(request: web.Request) -> web.StreamResponse:
    raise web.HTTPFound("/v/index")


async def failing(request: web.Request) -> web.StreamResponse:
    return web.Response(status=503)


@pytest.mark.parametrize("handler", [whole_file, another_range, cut_short, elsewhere, failing])
async def test_answers_that_are_not_the_range_are_refused(links: list[Link], site: Any, handler: Handler) -> None:
    url, folder, _, instead = site
    write(folder, links[0].blobs)
    instead["00000.blobs"] = handler
    with pytest.raises(Unavailable, match="/v"):
        await read(url, list(links[0].blobs))


async def test_a_copy_that_is_not_there_is_not_there(site: Any) -> None:
    with pytest.raises(VersionUnavailable, match="index"):
        await read(site[0], [bytes(32)])
    with pytest.raises(Unavailable, match="broke off"):
        await read("http://127.0.0.1:1/v", [bytes(32)])


async def test_lies_of_a_copy_are_noticed_by_the_puller(links: list[Link], site: Any, serve: Any, pullers: Any) -> None:
    url, folder, _, _ = site
    write(folder, links[4].blobs)
    content = bytearray((folder / "00000.blobs").read_bytes())
    content[len(content) // 2] ^= 1
    (folder / "00000.blobs").write_bytes(content)
    relay = await serve(links)
    relay.script.ways = [NEWEST]
    relay.script.sources = [BlobSource(name="copy", address=url, site="here", static=True)]
    mirror = Mirror(links[0].manifest, None)
    done = await pull(pullers(relay), mirror, links[4])
    assert_right(mirror, links[4])
    assert set(done.bytes_by_source) == {"copy", "weight-relay"}


def record(digest: bytes, size: int) -> bytes:
    return RECORD.pack(digest, size, 0, 0)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"EbStatic",
        struct.pack("<8sII", b"Another!", 1, 0),
        struct.pack("<8sII", b"EbStatic", 2, 0),
        HEAD + bytes(47),
    ],
)
def test_what_is_no_index_is_refused(data: bytes) -> None:
    with pytest.raises(ChunkCorrupt):
        StaticIndex(data)


def test_an_index_that_lies_about_order_or_sizes_only_lacks_blobs() -> None:
    a, b = b"a" * 32, b"b" * 32
    assert StaticIndex(HEAD + record(a, 5) + record(b, 6)).spots([b, a]) == [BlobSpan(0, 0, 6, b), BlobSpan(0, 0, 5, a)]
    for data in (HEAD, HEAD + record(a, 1 << 31), HEAD + record(b"a" * 8 + b"x" * 24, 5)):
        with pytest.raises(VersionUnavailable):
            StaticIndex(data).spots([a])
    close = b"a" * 8 + b"\0" * 24
    assert StaticIndex(HEAD + record(close, 5) + record(a, 6)).spots([a]) == [BlobSpan(0, 0, 6, a)]


def test_spans_hold_what_lies_together() -> None:
    spots = [
        BlobSpan(0, 0, 10, b"a"),
        BlobSpan(0, 10, 10, b"b"),
        BlobSpan(0, 50_000, 10, b"c"),
        BlobSpan(1, 50_010, 10, b"d"),
    ]
    assert [[spot.digest for spot in span] for span in spans(spots[::-1])] == [[b"a", b"b"], [b"c"], [b"d"]]
    big = [BlobSpan(0, at << 20, 1 << 20, bytes([at])) for at in range(20)]
    assert [len(span) for span in spans(big)] == [8, 8, 4]
    overlapping = [BlobSpan(0, 0, 10, b"a"), BlobSpan(0, 5, 10, b"b")]
    assert [len(span) for span in spans(overlapping)] == [1, 1]
