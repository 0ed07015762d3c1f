"""Real processes of a local cluster, on a machine that imitates eight GPUs: what each prints is what it sees."""

import json
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from msgspec.structs import replace

from ebbtide.local_cluster.launcher import Program, tethered
from ebbtide.local_cluster.local_cluster import ClusterShape, LocalCluster, free_address, local_cluster
from tests.fakes.nvml import gpus, imitate
from tests.integration.cli.stand_ins import program

SEES = "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])"
#: Stands for the trainer, and starts its rank processes with the environment that it gives them.
RANKS = """
import os, subprocess, sys
from ebbtide.trainer.ranks.rank_launcher import _environment
print(os.environ["CUDA_VISIBLE_DEVICES"], flush=True)
program = "import os; e = os.environ; print(e['CUDA_VISIBLE_DEVICES'].split(',')[int(e['LOCAL_RANK'])])"
for number in range(3):
    subprocess.run([sys.executable, "-c", program], env=_environment(number, 3, 1), check=True)
"""
UUIDS = [gpu.uuid for gpu in gpus(8)]


async def printed(cluster: LocalCluster, placed: Program, code: str) -> list[str]:
    """What a process with the program's environment says."""
    stand_in = replace(placed, command=tethered(sys.executable, "-c", code), ready_file=None)
    await cluster.launcher.run_once(stand_in, lambda: None)
    return placed.log.read_text().split()


async def test_each_process_sees_its_own_gpus_and_ranks_theirs_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    imitate(monkeypatch, gpus(8), visible="7,6,5,4,3,2,1,0")
    (model := tmp_path / "model").mkdir()
    (model / "config.json").write_text(json.dumps({"dtype": "bfloat16"}))
    (config := tmp_path / "pair.toml").write_text("[vllm]\ntensor_parallel_size = 2\n")
    shape = ClusterShape(
        model=model, ranks=3, workers=2, worker_configs=(config,), coordinator="127.0.0.1:1", relay="127.0.0.1:2"
    )
    said: list[str] = []
    async with local_cluster(tmp_path / "up", said.append) as cluster:
        cluster._plan(shape)
        placed = [cluster.next_worker() for _ in range(2)]
        trainer = await printed(cluster, cluster._trainer(), RANKS)
        workers = [await printed(cluster, one, SEES) for one in placed]
    down = UUIDS[::-1]
    assert trainer == [",".join(down[:3]), *down[:3]]
    assert workers == [[",".join(down[3:5])], [",".join(down[5:7])]]
    assert said[:3] == ["trainer: GPU 7, 6, 5", "worker-1: GPU 4, 3", "worker-2: GPU 2, 1"]


async def test_a_serving_engine_boots_with_the_cluster_on_its_own_gpu_and_ends_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    imitate(monkeypatch, gpus(2))
    (model := tmp_path / "model").mkdir()
    monkeypatch.setattr(
        "ebbtide.local_cluster.local_cluster.serving_engine", lambda *_, **facts: served(tmp_path, facts)
    )
    shape = ClusterShape(
        model=model,
        workers=1,
        borrowed=True,
        coordinator=free_address(),
        relay=free_address(),
        served=model,
        served_name="it",
    )
    async with local_cluster(tmp_path / "up", print) as cluster:
        await cluster.boot(shape)
        assert cluster.workers == [], "a borrowed worker waits for the guard"
        serving = cluster.launcher.process("serving")
        assert cluster.serving_url == f"http://serving:{serving.pid}"
        assert psutil.Process(serving.pid).environ()["CUDA_VISIBLE_DEVICES"] == UUIDS[1]
        assert serving.program.stage > max(
            cluster.launcher.process(name).program.stage for name in ("redis", "relay", "coordinator", "trainer")
        )


def served(folder: Path, facts: dict[str, Any]) -> Program:
    made = program(folder, facts["name"], stage=facts["stage"])
    return replace(made, environment=made.environment | facts["share"].environment)
