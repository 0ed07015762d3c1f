"""examples/grpo_loop.py on its real task: a real engine of `ebbtide up`, the demo's base model, one rank and two."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from ebbtide.free_ports import free_port
from ebbtide.local_cluster.launcher import tethered

ROOT: Final = Path(__file__).parents[2]
#: The first test waits for the cluster; on a machine that has no base model yet, for that too.
pytestmark = pytest.mark.timeout(900)
STEPS, GROUPS, SAMPLES = 3, 8, 8


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, dict[str, str]]]:
    """The model that a cluster of one worker serves, and the variables of its clients."""
    folder = tmp_path_factory.mktemp("up")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("EBBTIDE_")}
    options = ["--workers", "1", "--run-dir", str(folder / "up"), "--cache", str(ROOT / ".cache" / "base-models")]
    addresses = ["--coordinator", "127.0.0.1:0", "--relay", "127.0.0.1:0", "--gateway", ""]
    with (folder / "out").open("wb") as out:
        command = tethered(sys.executable, "-m", "ebbtide.cli", "up", *options, *addresses)
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=inherited | {"COLUMNS": "500"})
    try:
        end = time.monotonic() + 600
        while not (folder / "up" / "env").exists():
            assert process.poll() is None, (folder / "out").read_text()
            assert time.monotonic() < end, (folder / "out").read_text()
            time.sleep(0.2)
        lines = (folder / "up" / "env").read_text().splitlines()
        given = dict(line.removeprefix("export ").split("=", 1) for line in lines)
        (model,) = re.findall(r"workers on (\S+)\. In another terminal", (folder / "out").read_text())
        yield model, inherited | given | {"OMP_NUM_THREADS": "1"}
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_loop_trains_on_what_a_real_engine_generates(cluster: tuple[str, dict[str, str]], ranks: int) -> None:
    model, environment = cluster
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--master-port", str(free_port())]
    sizes = ["--steps", str(STEPS), "--groups", str(GROUPS), "--samples", str(SAMPLES), "--run-id", f"ranks-{ranks}"]
    command = [sys.executable, *(torchrun if ranks > 1 else []), str(ROOT / "examples" / "grpo_loop.py")]
    done = subprocess.run(
        [*command, "--model", model, *sizes], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rewards = [float(one) for one in re.findall(r"reward (\d\.\d+)", done.stdout)]
    assert len(rewards) == STEPS
    assert all(0.1 < one < 0.9 for one in rewards), "the base model spells some words, and not all"
    total = STEPS * GROUPS * SAMPLES
    assert f"ranks-{ranks}: {total} of {total} rollouts trained" in done.stdout
