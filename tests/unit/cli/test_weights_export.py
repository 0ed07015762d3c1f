"""`ebbtide weights export` as a person meets it: it says that it waits for the relay only while it does."""

from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ebbtide.cli.__main__ import app
from ebbtide.cli.waiting import Waiting
from ebbtide.weight_relay.static_copy import StaticCopyWriter
from tests.integration.weight_relay.lines import Line
from tests.unit.weight_relay.upstreams import Blobs, LineUpstream


def test_an_export_waits_for_the_relays_answers_and_not_for_its_own_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = Line(1, sizes={"small": ("U8", "|u1", 77), "other": ("U8", "|u1", 99)})
    waits: list[tuple[str, list[Any]]] = []

    def note(name: str) -> None:
        waits.append((name, [waiting._what for waiting in Waiting._inside]))

    def noted(kind: type, name: str) -> None:
        inner = getattr(kind, name)

        def call(*given: Any) -> Any:
            note(name)
            return inner(*given)

        monkeypatch.setattr(kind, name, call)

    send = Blobs.tiles

    async def tiles(source: Blobs, digests: Sequence[bytes]) -> AsyncGenerator[tuple[bytes, bytes], None]:
        async for tile in send(source, digests):
            note("tile")
            yield tile

    for name in ("__init__", "add", "finish"):
        noted(StaticCopyWriter, name)
    noted(LineUpstream, "manifest")
    monkeypatch.setattr(Blobs, "tiles", tiles)
    monkeypatch.setattr("ebbtide.weight_relay.subscription.RelayUpstream", lambda *_: LineUpstream(line, 1))
    done = CliRunner().invoke(app, ["weights", "export", "--run", "run", "--folder", str(tmp_path), "--version", "1"])
    assert "version 1: 2 blobs" in done.output, done.output
    relay, own = ["the weight-relay"], list[str]()
    written = [("tile", relay), ("add", own)] * 2
    assert waits == [("manifest", relay), ("__init__", own), *written, ("finish", own)]
