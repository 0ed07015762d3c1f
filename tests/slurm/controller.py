"""A Slurm of one node: real munged, slurmctld and slurmd in the foreground, configured in a folder of their own.

The node claims 16 processors, whatever the machine has, and Slurm binds no process to any.

Invariant: `close` cancels what runs, waits until its processes are gone, and ends the three by their ids.
"""

import os
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from ebbtide.free_ports import free_port

PROGRAMS: Final = ("munged", "slurmctld", "slurmd", "sbatch")
#: Between SIGTERM and SIGKILL of a job that ends.
_KILL_WAIT_S: Final = 8
#: How long a requeued job waits before it may start again. The default is 120.
_AGAIN_S: Final = 6
_BOOT_S: Final = 90.0
_CONF: Final = """\
ClusterName=ebbtide
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmdPort={node_port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire={again}
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SchedulerParameters=bf_interval=1,sched_interval=2
ReturnToService=2
KillWait={kill_wait}
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
{notice}
NodeName={host} NodeHostname={host} NodeAddr=127.0.0.1 CPUs=16 CoresPerSocket=16 State=UNKNOWN
PartitionName=reserved Nodes={host} PriorityTier=10 PreemptMode=OFF
PartitionName=preemptible Nodes={host} PriorityTier=1 PreemptMode=REQUEUE GraceTime={grace}
"""


class Slurm:
    """Not started yet. `grace_s`: what the preemptible partition gives a job between a notice and its end; 0 gives no
    notice but SIGTERM."""

    def __init__(self, folder: Path, *, grace_s: int) -> None:
        self.folder, self._host = folder, socket.gethostname().partition(".")[0]
        self._processes: list[subprocess.Popen[bytes]] = []
        for name in ("munge", "state", "spool"):
            (folder / name).mkdir(parents=True, mode=0o711)
        conf = folder / "slurm.conf"
        conf.write_text(
            _CONF.format(
                host=self._host,
                folder=folder,
                controller_port=free_port(),
                node_port=free_port(),
                kill_wait=_KILL_WAIT_S,
                again=_AGAIN_S,
                grace=grace_s,
                notice="SlurmctldParameters=preempt_send_user_signal" if grace_s else "",
            )
        )
        self._environment = {**os.environ, "SLURM_CONF": str(conf)}

    def start(self) -> None:
        """Start all, and wait until the node takes jobs. Raises `TimeoutError` with their logs."""
        munge = self.folder / "munge"
        key = munge / "key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o600)
        own = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        self._spawn("munged", "--foreground", "--force", *(f"--{flag}={munge / name}" for flag, name in own.items()))
        self._wait((munge / "socket").exists, "munged")
        self._spawn("slurmctld", "-D", "-i")
        self._spawn("slurmd", "-D", "-N", self._host)
        self._wait(lambda: self._ask("sinfo", "--noheader", "--format=%T") == "idle", "an idle node")

    def submit(self, *words: str, environment: Mapping[str, str] | None = None) -> str:
        """The id of a job that sbatch was given."""
        done = subprocess.run(
            ["sbatch", "--parsable", *words],
            env={**self._environment, **(environment or {})},
            cwd=self.folder,
            capture_output=True,
            text=True,
            check=False,
            timeout=30,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def state(self, job: str) -> dict[str, str]:
        """What scontrol knows of a job, or of a task of an array (JOB_TASK)."""
        words = self._ask("scontrol", "--oneliner", "show", "job", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def close(self) -> None:
        """Cancel all jobs, and end Slurm."""
        if len(self._processes) == len(PROGRAMS) - 1:
            self._ask("scancel", "--user=root")
            end = time.monotonic() + _KILL_WAIT_S + 20
            while self._ask("squeue", "--noheader") and time.monotonic() < end:
                time.sleep(0.2)
        for process in reversed(self._processes):
            process.terminate()
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _spawn(self, *command: str) -> None:
        with (self.folder / f"{command[0]}.log").open("wb") as log:
            path = shutil.which(command[0]) or command[0]
            process = subprocess.Popen(
                [path, *command[1:]], env=self._environment, stdout=log, stderr=subprocess.STDOUT, cwd=self.folder
            )
        self._processes.append(process)

    def _ask(self, *command: str) -> str:
        done = subprocess.run(
            command, env=self._environment, capture_output=True, text=True, check=False, timeout=60, cwd=self.folder
        )
        return done.stdout.strip()

    def _wait(self, done: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + _BOOT_S
        while not done():
            if time.monotonic() > end:
                logs = "".join(path.read_text(errors="replace")[-1500:] for path in self.folder.glob("*.log"))
                raise TimeoutError(f"{what} not within {_BOOT_S:g} s:\n{logs}")
            time.sleep(0.1)
