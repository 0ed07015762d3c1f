"""Trains a step on groups that are streamed in any order, on one rank or on two, and reads its gradient."""

import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import torch

from ebbtide.free_ports import free_port
from ebbtide.trainer import training_checkpoint
from ebbtide.trainer.learning.network import load_network
from tests.integration.trainer.fixed_training import RUN, Job, make_spec

#: Seeds of the orders in which groups are streamed; None: the whole batch at once.
ORDERS = (None, 1, 2)

Told = list[dict[str, float]]


def together(jobs: list[Job], folder: Path) -> list[Told]:
    """The jobs on two ranks, and what rank 0 was told of each."""
    file = folder / "jobs.json"
    file.write_bytes(msgspec.json.encode(jobs))
    script = [sys.executable, str(Path(__file__).with_name("fixed_training.py")), str(file)]
    common = {
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    paths = (str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH", ""))
    common |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    ranks = [subprocess.Popen(script, env=os.environ | common | {"RANK": str(rank)}) for rank in range(2)]
    try:
        assert [rank.wait(300) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    told: list[Told] = json.loads(file.with_suffix(".told").read_text())
    return told


def streamed_job(model: Path, folder: Path, ranks: str, order: int | None) -> Job:
    """A step on unclipped gradients, without the KL term, which cannot be streamed."""
    spec = make_spec(model, minibatches=1, kl_coefficient=0.0, max_grad_norm=1e9)
    name = str(folder / f"{ranks}-streamed-{order}")
    return Job(spec=spec, folder=name, steps=(0, 1), saves=(1,), groups=12, order=order)


def gradient(folder: Path, name: str, model: Path) -> torch.Tensor:
    """A first step's gradient, times a constant: as the optimiser begins with averages of 0, it is the average then."""
    parameters = list(load_network(model).parameters())
    _, state = training_checkpoint.read_state(folder / name / "step-000001", run_id=RUN, parameters=parameters)
    found = state["optimizer"]["state"]
    return torch.cat([found[number]["exp_avg"].double().flatten() for number in range(len(parameters))])
