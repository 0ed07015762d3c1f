"""A whole local cluster with scripted engines, and the commands that people use on it."""

import json
import os
import re
import signal
import stat
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from pathlib import Path

import numpy as np
import psutil
import pytest

from ebbtide.client import Client
from ebbtide.local_cluster.host_resources import MirrorFolder
from ebbtide.types.run import RunEvent
from tests.fakes.scripted_settings import ENGINE
from tests.integration.cli.stand_ins import alive
from tests.support.waiting import wait_until

pytestmark = pytest.mark.timeout(240)

SPEC = """
name = "mine"
model = "{model}"
[environment]
name = "{environment}"
{params}
"""


class Up:
    """A running `ebbtide up`, and commands that talk to it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "worker.toml").write_text(f'engine = "{ENGINE}"\n')
        self.environment = {name: value for name, value in os.environ.items() if not name.startswith("EBBTIDE_")}
        options = [
            "--model",
            str(folder),
            "--run-dir",
            str(folder / "up"),
            "--worker-config",
            str(folder / "worker.toml"),
        ]
        addresses = ["--coordinator", "127.0.0.1:0", "--relay", "127.0.0.1:0", "--gateway", "127.0.0.1:0", "--standby"]
        with (folder / "out").open("wb") as out:
            command = [sys.executable, "-m", "ebbtide.cli", "up", *options, *addresses]
            self.process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=self.environment)

    def wait(self, seconds: float = 120) -> None:
        """Until it says that it is up; then its settings are in the environment."""
        end = time.monotonic() + seconds
        env = self.folder / "up" / "env"
        while not env.exists():
            assert self.process.poll() is None, self.said()
            assert time.monotonic() < end, self.said()
            time.sleep(0.1)
        for line in env.read_text().splitlines():
            name, _, value = line.removeprefix("export ").partition("=")
            self.environment[name] = value

    def said(self) -> str:
        return (self.folder / "out").read_text()

    def run(self, *words: str) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-m", "ebbtide.cli", *words]
        return subprocess.run(command, capture_output=True, text=True, check=False, env=self.environment)

    def token(self) -> str:
        return (self.folder / "up" / "token").read_text()

    def mirrors(self) -> list[Path]:
        """What workers hold of weights now, on disk or in memory."""
        folder = MirrorFolder(self.folder / "up", Path("/dev/shm"))  # noqa: S108 - looks only
        return [file for mirrors in (folder.on_disk, folder.in_memory) for file in mirrors.glob("*/*")]

    def pids(self) -> list[int]:
        return [child.pid for child in psutil.Process(self.process.pid).children(recursive=True)]


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    made = Up(tmp_path_factory.mktemp("up"))
    try:
        made.wait()
    except AssertionError:
        made.process.kill()
        made.process.wait()
        raise
    yield made
    pids = made.pids()
    made.process.send_signal(signal.SIGINT)
    assert made.process.wait(60) == 0
    assert len(pids) >= 8
    assert alive(pids) == []
    assert made.mirrors() == []
    assert "All processes are gone" in made.said()


async def watched(client: Client, kind: str, count: int) -> AsyncIterator[RunEvent]:
    """The first events of a kind that a run of the name `w` tells."""
    async with aclosing(client.watch("w")) as events:
        async for event in events:
            if event.kind == kind:
                yield event
                count -= 1
            if not count:
                return


def spec(folder: Path, environment: str = "number_guessing", model: str = "nowhere", params: str = "") -> str:
    path = folder / "RUN.toml"
    path.write_text(SPEC.format(model=model, environment=environment, params=params))
    return str(path)


def test_while_it_boots_it_names_what_is_not_ready(up: Up) -> None:
    assert re.search(r"ebbtide: waiting for [a-z0-9, -]+ to be ready since \S+, 2 s", up.said())


def test_the_token_is_the_owners_alone(up: Up) -> None:
    mode = stat.S_IMODE((up.folder / "up" / "token").stat().st_mode)
    assert mode == 0o600


def test_workers_are_listed_with_what_they_do(up: Up) -> None:
    listed = up.run("worker", "list").stdout
    assert re.search(r"worker-1 +spot +waits for work", listed)
    assert re.search(r"worker-2 +spot +waits for work", listed)
    told = json.loads(up.run("worker", "list", "--json").stdout)
    assert [(one["worker_id"], one["kind"], one["state"]) for one in told] == [
        ("worker-1", "spot", "ready"),
        ("worker-2", "spot", "ready"),
    ]


def test_a_submitted_run_is_listed_and_can_be_cancelled(up: Up, tmp_path: Path) -> None:
    done = up.run("run", "submit", spec(tmp_path), "--no-check", "--run-id", "mine-1")
    assert done.stdout == "mine-1\n", done.stderr
    assert "mine-1" in up.run("run", "list").stdout
    (listed,) = json.loads(up.run("run", "list", "--json").stdout)
    assert listed["run_id"] == "mine-1"
    assert listed["spec"]["environment"]["name"] == "number_guessing"
    assert json.loads(up.run("run", "show", "mine-1", "--json").stdout)["spec"] == listed["spec"]
    assert json.loads(up.run("run", "usage", "mine-1", "--json").stdout) == []
    cancelled = up.run("run", "cancel", "mine-1")
    # Its trainer may have found first that there is no such model.
    assert cancelled.stdout in {"mine-1 cancelled\n", "mine-1 failed\n"}, cancelled.stderr
    assert up.run("run", "watch", "mine-1").returncode == 1


def test_commands_find_the_other_coordinator_when_the_one_that_leads_is_killed(up: Up) -> None:
    logs = [up.folder / "up" / "logs" / f"{name}.log" for name in ("coordinator", "coordinator-2")]
    (leader,) = [log.stem for log in logs if '"took over"' in log.read_text()]
    ready = str(Path("ready", f"{leader}.json"))
    (pid,) = [pid for pid in up.pids() if any(word.endswith(ready) for word in psutil.Process(pid).cmdline())]
    os.kill(pid, signal.SIGKILL)
    done = up.run("run", "list")
    assert done.returncode == 0, done.stderr
    assert f"{leader} ended with signal SIGKILL; it is started again" in " ".join(up.said().split())


def test_submitting_checks_the_environment_and_the_model_first(up: Up, tmp_path: Path) -> None:
    done = up.run("run", "submit", spec(tmp_path, environment="no_such"))
    assert (done.returncode, done.stdout) == (2, "")
    assert ":3:9: model: 'nowhere' is no directory" in done.stderr
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 8}))
    done = up.run("run", "submit", spec(tmp_path, model=str(tmp_path)))
    assert "model: " in done.stderr
    assert "safetensors" in done.stderr


def test_a_run_that_is_not_there_is_told_in_one_line(up: Up) -> None:
    for command in ("cancel", "watch"):
        done = up.run("run", command, "no-such-run")
        assert done.returncode == 1
        assert done.stderr.startswith("ebbtide: there is no run no-such-run")
        assert len(done.stderr.splitlines()) == 1


def test_a_chat_reaches_the_clusters_gateway_without_any_option(up: Up) -> None:
    done = up.run("run", "chat", "no-such-run", "hello")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("ebbtide: model: no live run has the id or name 'no-such-run'")


async def test_the_weights_of_a_run_are_told_and_a_copy_of_them_is_written(up: Up, tmp_path: Path) -> None:
    run_spec = {"name": "w", "model": "m", "environment": {"name": "e"}, "trainer": {"name": "external"}}
    first = np.random.default_rng(0).normal(size=(512, 1024)).astype(np.float16)
    second = first.copy()
    second[::7, ::5] *= np.float16(1.01)
    where = {name.removeprefix("EBBTIDE_").lower(): value for name, value in up.environment.items()}
    token = up.token()
    async with Client(where["coordinator"], where["relay"], token=token) as client:
        await client.submit(run_spec, "w")
        async with client.claim("w") as lease:
            parent = (await lease.publish({"w": first}, step=0)).version
            await lease.publish({"w": second}, step=1, parent=parent)
            told = re.compile(
                r"2 versions, the newest 2 of 1\.05 MB; a patch from 1 takes \d+(\.\d+)?x less; 2 have it"
            )
            await wait_until(lambda: told.search(up.run("run", "weights", "w").stdout), timeout=30)
            assert up.mirrors()
            installs = [one async for one in watched(client, "installed", 2)]
    assert {one.labels["worker"] for one in installs} == {"worker-1", "worker-2"}
    assert {one.values["version"] for one in installs} <= {1, 2}
    copied = up.run("weights", "export", "--run", "w", "--relay", where["relay"], "--folder", str(tmp_path / "copy"),
                    "--version", "1")  # fmt: skip
    assert copied.returncode == 0, copied.stderr
    assert copied.stdout.startswith("version 1: 1 blobs, 1048576 bytes in ")


async def test_coordinators_that_are_killed_are_started_again_at_the_same_addresses(up: Up) -> None:
    both = [pid for pid in up.pids() if "ebbtide.coordinator" in psutil.Process(pid).cmdline()]
    assert len(both) == 2
    for pid in both:
        os.kill(pid, signal.SIGKILL)
    await wait_until(lambda: up.run("worker", "list").stdout.count("waits for work") == 2, timeout=30)
    assert "coordinator ended with signal SIGKILL; it is started again" in up.said()


def test_a_second_cluster_in_the_same_directory_is_refused(up: Up) -> None:
    config = str(up.folder / "worker.toml")
    done = up.run("up", "--model", str(up.folder), "--run-dir", str(up.folder / "up"), "--worker-config", config)
    assert done.returncode == 2
    assert "another cluster runs in it" in done.stderr


def test_up_says_where_weights_are_and_refuses_gpus_that_are_not_there(up: Up) -> None:
    assert re.search(r"Weights that workers install are (in memory|on disk), in /", " ".join(up.said().split()))
    config = str(up.folder / "worker.toml")
    done = up.run("up", "--model", str(up.folder), "--run-dir", str(up.folder / "b"), "--worker-config", config,
                  "--gpus", "99")  # fmt: skip
    assert done.returncode == 2
    assert "--gpus: 99 are wanted, and " in done.stderr
    assert not (up.folder / "b").exists()


async def test_a_killed_launcher_leaves_nothing(tmp_path: Path) -> None:
    made = Up(tmp_path)
    made.wait()
    pids = made.pids()
    made.process.kill()
    made.process.wait()
    await wait_until(lambda: alive(pids) == [], timeout=20)
    assert len(pids) >= 8
