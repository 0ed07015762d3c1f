"""What engines read at their installs, and what was pulled for it."""

from pathlib import Path

import pytest
from prometheus_client import REGISTRY

from ebbtide.rollout_worker.engine.checkpoint_facts import header
from tests.fakes.scripted_engine import ScriptedEngine

#: The version of each install that succeeded, and the bytes of its tensors.
Reads = list[tuple[int, dict[str, bytes]]]


def watch_reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    """Have scripted engines read all of what they install."""
    found: Reads = []
    install = ScriptedEngine.install

    async def reading(engine: ScriptedEngine, version: int, weights: Path, changes: Path | None = None) -> float:
        before = tensors(weights)
        took = await install(engine, version, weights, changes)
        assert tensors(weights) == before, "changed while it was read"
        found.append((version, before))
        return took

    monkeypatch.setattr(ScriptedEngine, "install", reading)
    return found


def tensors(file: Path) -> dict[str, bytes]:
    data = file.read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    found = {}
    for name, entry in header(file).items():
        if name == "__metadata__":
            continue
        start, end = entry["data_offsets"]
        found[name] = data[begin + start : begin + end]
    return found


def pulled(kind: str = "") -> float:
    """Bytes of weights that the workers of this process fetched, from sources of one kind or all."""
    samples = [sample for metric in REGISTRY.collect() for sample in metric.samples]
    name = "ebbtide_worker_pulled_bytes_total"
    return sum(one.value for one in samples if one.name == name and kind in {"", one.labels["kind"]})
