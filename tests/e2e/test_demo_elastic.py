"""A short `ebbtide demo elastic` on real engines: a trainer that generates, spot workers that go, and a fixed pool."""

import asyncio
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from ebbtide.local_cluster.launcher import tethered
from tests.support.waiting import wait_until
from tests.tiny_model import save_tiny_model

#: The first test waits for the demo; the long one, on a machine that has no base model yet, for that too.
pytestmark = pytest.mark.timeout(900)

STEPS, GROUPS, SIZE = 4, 4, 4
SPEC = f"""
name = "elastic"
model = "MODEL"
[environment]
name = "tests.integration.trainer.environments_for_tests:make_source"
[sampling]
max_tokens = 48
[batch]
groups_per_step = {GROUPS}
group_size = {SIZE}
[trainer]
learning_rate = 1e-3
checkpoint_every = 2
"""
#: The machine is lost in the first seconds of the run; another one comes soon after.
TRACE = "t_s,event,node\n0,add,a\n180,remove,a\n240,add,b\n36000,remove,b\n"


def demo_command(folder: Path, *options: str) -> tuple[str, ...]:
    return tethered(sys.executable, "-m", "ebbtide.cli", "demo", "elastic", "--run-dir", str(folder), *options)


def started(folder: Path) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(demo_command(folder), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)


def left_of(folder: Path) -> list[list[str]]:
    """Command lines of processes that name the folder."""
    found = (process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"]))
    return [line for line in found if str(folder) in str(line)]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str, Path]:
    """The report of a demo with a tiny model, what it printed, and its directory."""
    folder = tmp_path_factory.mktemp("demo")
    model, spec, trace = save_tiny_model(folder / "model", head=32), folder / "run.toml", folder / "trace.csv"
    spec.write_text(SPEC.replace("MODEL", str(model)))
    trace.write_text(TRACE)
    runs = folder / "runs"
    command = demo_command(runs, "--spec", str(spec), "--trace", str(trace), "--steps", str(STEPS))
    done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return json.loads((runs / "report.json").read_text()), done.stdout, runs


def test_both_pools_train_every_rollout(demo: tuple[dict[str, Any], str, Path]) -> None:
    for run in demo[0]["runs"]:
        assert run["report"]["status"] == "finished"
        assert run["report"]["rollouts_submitted"] == run["report"]["rollouts_trained"] == STEPS * GROUPS * SIZE
    assert demo[0]["elastic"]["steps"] == demo[0]["fixed"]["steps"] == STEPS - 1


def test_the_elastic_trainers_device_is_its_own_and_lent_in_turns(demo: tuple[dict[str, Any], str, Path]) -> None:
    elastic, fixed = demo[0]["runs"]
    states = [turn["state"] for turn in elastic["turns"]]
    assert states.count("lent") >= STEPS
    assert states.count("held") >= STEPS
    assert sum(demo[0]["elastic"]["device"].values()) == pytest.approx(1.0)
    assert fixed["turns"] == []


def test_a_spot_machine_is_lost_and_costs_nothing_from_then_on(demo: tuple[dict[str, Any], str, Path]) -> None:
    elastic, fixed = demo[0]["runs"]
    lost = elastic["stays"][0]
    assert (lost["begin_s"], lost["ready_s"]) == (pytest.approx(0.0, abs=0.5), 0.0)
    assert lost["end_s"] == pytest.approx(3.0, abs=2.0)
    assert fixed["stays"] == []
    figures = demo[0]["fixed"]
    assert figures["reserved_s"] == pytest.approx(2 * figures["seconds"])


def test_the_end_has_ratios_a_strip_and_pictures(demo: tuple[dict[str, Any], str, Path]) -> None:
    report, printed, folder = demo
    assert f"{report['throughput_over_fixed']:.2f} times" in printed
    assert "trainer's device" in printed
    assert "prices" in printed
    for name in ("report.png", "elastic/timeline.png", "fixed/timeline.png"):
        assert (folder / name).read_bytes().startswith(b"\x89PNG")


def test_no_process_of_either_pool_is_left(demo: tuple[dict[str, Any], str, Path]) -> None:
    assert left_of(demo[2]) == []


@pytest.mark.nightly
def test_the_whole_demo_lends_loses_machines_and_learns(tmp_path: Path) -> None:
    done = subprocess.run(demo_command(tmp_path), capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["elastic"]["lost"] >= 1
    assert report["elastic"]["device"]["lent"] > 0.1
    for run in report["runs"]:
        assert run["report"]["rollouts_accounted_for"]
        rewards = run["report"]["rewards"]
        assert sum(rewards[-4:]) > sum(rewards[:4])


@pytest.mark.nightly
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT], ids=["SIGKILL", "SIGINT"])
async def test_a_demo_that_is_killed_or_interrupted_leaves_nothing_behind(
    tmp_path: Path, number: signal.Signals
) -> None:
    with started(tmp_path) as process:
        await wait_until((tmp_path / "elastic" / "ready" / "worker-1.json").exists, timeout=600, what="a worker")
        process.send_signal(number)
        await asyncio.to_thread(process.wait, 60)
    await wait_until(lambda: left_of(tmp_path) == [], timeout=20, what="the end of all processes")
