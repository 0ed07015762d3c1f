"""A trainer of four processes publishes its shards; nobody gathers, and what is fetched is the gathered model."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ebbtide.auth.security import ClientSecurity
from ebbtide.client.service_peer import ServicePeer
from ebbtide.errors import VersionUnavailable
from ebbtide.free_ports import free_port
from ebbtide.weights import Signer
from tests.integration.client.reader import Reader

TOKEN = "a-token-of-tests"
RANKS = 4
KEY = Signer(bytes(range(32))).public


async def train(folder: Path, relay: str, kinds: str, *flags: str) -> list[tuple[int | None, list[dict[str, Any]]]]:
    """Run `ranks.py` on all ranks; how each ended, and what it said."""
    port = str(free_port())
    script = str(Path(__file__).with_name("ranks.py"))
    environment = {**os.environ, "EBBTIDE_TOKEN": TOKEN, "OMP_NUM_THREADS": "1"}

    async def one(rank: int) -> tuple[int | None, list[dict[str, Any]]]:
        command = [sys.executable, script, kinds, str(rank), port, str(folder), relay, *flags]
        process = await asyncio.create_subprocess_exec(
            *command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        try:
            out, errors = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if process.returncode:
            sys.stderr.buffer.write(errors)
        return process.returncode, [json.loads(line) for line in out.splitlines() if line.startswith(b"{")]

    return await asyncio.gather(*(one(rank) for rank in range(RANKS)))


@pytest.mark.timeout(240)
async def test_shards_of_every_kind_make_up_the_gathered_model_bit_for_bit(relay: str, tmp_path: Path) -> None:
    kinds = ["fsdp", "tensor", "both", "replicas"]
    ranks = await train(tmp_path, relay, ",".join(kinds))
    assert [status for status, _ in ranks] == [0] * RANKS
    told = {(line["run"], line["version"]): line for line in ranks[0][1]}
    peer = ServicePeer("weight-relay", relay, ClientSecurity(token=TOKEN), patience_s=5.0)
    for kind in kinds:
        reader = Reader(peer, kind, KEY)
        for version in (1, 2, 3):
            found, expected = await reader.read(version), load_file(tmp_path / f"{kind}.{version}.safetensors")
            assert found.keys() == expected.keys()
            for name, tensor in expected.items():
                assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
                assert torch.equal(found[name], tensor), (kind, version, name)
        reader.close()
        first, second, third = (told[kind, version] for version in (1, 2, 3))
        assert (first["kind"], second["kind"], third["kind"]) == ("keyframe", "patch", "patch")
        assert 0 < first["sent"] <= 2 * first["dense"]  # replicas outside of a mesh may both send theirs
        assert first["dense"] == second["dense"]
        assert 0 < second["sent"] < second["dense"] / 2
        assert 0 < second["density"] < 0.06
        assert (third["sent"], third["density"]) == (0, 0.0)
    await peer.close()


@pytest.mark.timeout(240)
async def test_a_rank_that_dies_leaves_no_version_and_the_others_know_whose_death_it_was(
    relay: str, tmp_path: Path
) -> None:
    *others, last = await train(tmp_path, relay, "fsdp", "DIE")
    assert last == (9, [])
    for status, lines in others:
        assert status == 1
        assert lines[-1]["error"] == "Unavailable"
        assert "rank 3 of the trainer is gone" in lines[-1]["text"]
    peer = ServicePeer("weight-relay", relay, ClientSecurity(token=TOKEN), patience_s=1.0)
    reader = Reader(peer, "fsdp", KEY)
    with pytest.raises(VersionUnavailable):
        await reader.read(2)
    assert (await reader.read(1)).keys() == load_file(tmp_path / "fsdp.1.safetensors").keys()
    reader.close()
    await peer.close()
