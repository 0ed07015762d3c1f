"""The page about bare metal, followed word for word on fresh machines, brings up a system that trains a run."""

import json
import os
import shutil
import time
from pathlib import Path

import pytest

from tests.bare.admin import Admin
from tests.bare.containers import Containers
from tests.bare.page import ADMIN, PAGE, Block, blocks

pytestmark = [pytest.mark.bare, pytest.mark.timeout(3600)]
UNITS = {
    "control": ["ebbtide-coordinator"],
    "relay": ["ebbtide-weight-relay"],
    "gateway": ["ebbtide-gateway"],
    "trainer": ["ebbtide-trainer", "ebbtide-driver"],
    "serving": ["ebbtide-serving-guard", "ebbtide-rollout-worker@0"],
}


def test_the_page_brings_up_a_system_that_trains(tmp_path: Path) -> None:
    if os.geteuid() != 0 or not shutil.which("podman") or not shutil.which("debootstrap"):
        pytest.skip("fresh machines are containers: they need root, podman and debootstrap")
    page = blocks(PAGE.read_text())
    hosts = sorted({host for block in page for host in block.hosts} - {ADMIN})
    assert hosts == ["control", "gateway", "relay", "serving", "trainer", "worker"]
    with Containers(tmp_path, hosts) as containers:
        admin = Admin(tmp_path, containers)
        for block in page:
            follow(block, containers, admin)
        check(containers)


def follow(block: Block, containers: Containers, admin: Admin) -> None:
    for host in block.hosts:
        began = time.monotonic()
        done = admin.run(block.commands) if host == ADMIN else containers.run(host, block.commands)
        print(f"line {block.line} on {host}: {time.monotonic() - began:.1f} s", flush=True)  # noqa: T201 - pytest -s
        if done.returncode:
            logs = containers.run(host, "journalctl --no-pager -n 40 -u 'ebbtide-*'").stdout if host != ADMIN else ""
            pytest.fail(f"line {block.line} on {host}:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}\n{logs}")


def check(containers: Containers) -> None:
    """Beyond what the commands' own status tells: who runs, as whom, how often, and what came of the run."""
    for host, units in UNITS.items():
        for unit in units:
            keys = "ActiveState,NRestarts,User,NoNewPrivileges"
            shown = containers.run(host, f"systemctl show --property={keys} {unit}").stdout.split()
            assert sorted(shown) == ["ActiveState=active", "NRestarts=0", "NoNewPrivileges=yes", "User=ebbtide"], unit
    screen = containers.run("serving", "/opt/ebbtide/bin/ebbtide guard status --json --grant-dir /run/ebbtide-grants")
    borrowers = json.loads(screen.stdout)["borrowers"]
    assert sum(one["tokens_harvested"] for one in borrowers) > 0, borrowers
    ended = containers.run("worker", "systemctl show --property=Result,ActiveState ebbtide-rollout-worker@0").stdout
    assert sorted(ended.split()) == ["ActiveState=inactive", "Result=success"]
    checkpoints = "/var/lib/ebbtide/runs/first/checkpoints"
    states = containers.run("trainer", f"cat {checkpoints}/step-*100/trainer/state.json").stdout
    assert json.loads(states)["training"]["step"] == 100
