"""One user's fake holders fill what a relay remembers, and another user's readers find their way all the same."""

from pathlib import Path

import pytest

from ebbtide.errors import NoCapacity
from ebbtide.rpc.status_table import translated
from ebbtide.v1 import weights_pb2 as pb
from ebbtide.weight_relay import holder_table
from ebbtide.weights import seal_manifest
from tests.integration.weight_relay.fanout import SIGNER, TILE, RunningRelay, Version, running

COPIES = 300


def asked(run_id: str, name: str) -> pb.FindWayRequest:
    holder = pb.Holder(name=name, site="a", host=name)
    return pb.FindWayRequest(run_id=run_id, policy="policy", version=1, holder=holder)


async def fill(relay: RunningRelay, run_id: str, count: int) -> None:
    for number in range(count):
        await relay.stub.FindWay(asked(run_id, f"{run_id}-fake-{number}"))


async def test_a_user_whose_holders_fill_the_relay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holder_table, "MAX_COPIES", COPIES)
    async with running(tmp_path / "relay") as relay:
        await Version(1, tiles=1).publish(relay.relay)
        greedy = Version(1, tiles=2)
        greedy.manifest = SIGNER.sign(seal_manifest("greedy", greedy.manifest.version, greedy.manifest.tensors, TILE))
        for digest in await greedy.begin(relay.relay):
            await relay.relay.intake.put(digest, bytes(greedy.blob(digest)))
        await relay.relay.intake.commit("greedy", greedy.manifest.version)
        await fill(relay, "greedy", COPIES)
        with pytest.raises(NoCapacity, match=f"{COPIES} copies are known to this relay"), translated("relay"):
            await relay.stub.FindWay(asked("greedy", "one-more"))
        for number in range(COPIES // 3):
            await relay.stub.FindWay(asked("run", f"reader-{number}"))
        shown = (await relay.describe()).holders
        assert {one.holder.name for one in shown} == {f"reader-{number}" for number in range(COPIES // 3)}
        assert await relay.find("reader-0", 1)
