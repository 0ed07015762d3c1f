"""Small programs that stand for services, and what is left of them."""

import os
import sys
from pathlib import Path

import psutil

from ebbtide.local_cluster.launcher import Program, tethered

SERVICE = """
import json, os, signal, subprocess, sys, time
ready, order, name, mode = sys.argv[1:5]
if mode == "crash":
    print("the reason why"); sys.exit(3)
def ended(*_):
    with open(order, "a") as file:
        print(name, file=file)
    sys.exit(0)
signal.signal(signal.SIGTERM, signal.SIG_IGN if mode == "deaf" else ended)
if mode in ("children", "escaping"):
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=mode == "escaping")
if mode == "late":
    open(ready + ".go").close()  # a FIFO: until somebody opens its other end
if mode != "slow":
    with open(ready + ".new", "w") as file:
        json.dump({"address": f"{name}:{os.getpid()}"}, file)
    os.rename(ready + ".new", ready)
while True:
    time.sleep(600)
"""


def program(
    folder: Path,
    name: str,
    *,
    mode: str = "good",
    stage: int = 0,
    tether: bool = False,
    boot_s: float = 20.0,
    stop_s: float = 5.0,
) -> Program:
    ready = folder / f"{name}.ready"
    command = (sys.executable, "-c", SERVICE, str(ready), str(folder / "order"), name, mode)
    return Program(
        name=name,
        command=tethered(*command) if tether else command,
        environment=dict(os.environ),
        log=folder / f"{name}.log",
        ready_file=ready,
        stage=stage,
        boot_s=boot_s,
        stop_s=stop_s,
    )


def below(pid: int) -> list[psutil.Process]:
    """All processes below `pid` that are more than a name in the process table."""
    return [child for child in psutil.Process(pid).children(recursive=True) if child.status() != psutil.STATUS_ZOMBIE]


def alive(pids: list[int]) -> list[int]:
    return [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]
