"""`ebbtide simulate`: which simulations it asks for, what it prints and writes, and what it refuses."""

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from ebbtide.cli.__main__ import main
from ebbtide.errors import EbbtideError, InvalidRequest
from ebbtide.lab_commands.simulation import SimulateOptions, run
from ebbtide.simulator.engines.roofline import GPUS, MODELS
from ebbtide.simulator.simulate import SeedTask
from tests.fakes import stub_simulation
from tests.support.waiting import wait_until


def simulated(options: SimulateOptions) -> int:
    """The command over simulations that are none."""
    return run(options, simulate=stub_simulation.simulate, name_of=lambda task: task.scenario or "as recorded")


def test_each_fleet_is_simulated_with_each_seed() -> None:
    both = SimulateOptions(scenario=Path("a.toml"), compare=(Path("b.toml"),), seed=3, seeds=2)
    drawn = replace(both, png=Path("x.png")).tasks()
    assert [[task.spans for task in tasks] for tasks in drawn] == [[True, False]] * 2
    assert both.tasks() == [
        [SeedTask(scenario=name, seed=3), SeedTask(scenario=name, seed=4)] for name in ("a.toml", "b.toml")
    ]


def test_a_recorded_run_has_its_own_fleet_unless_a_scenario_is_named() -> None:
    own = SimulateOptions(recording=Path("run.json"), compare=(Path("b.toml"),))
    assert [tasks[0].scenario for tasks in own.tasks()] == ["", "b.toml"]
    other = SimulateOptions(recording=Path("run.json"), scenario=Path("a.toml"))
    assert other.tasks() == [[SeedTask(scenario="a.toml", recording="run.json")]]
    with pytest.raises(InvalidRequest, match=r"^SCENARIO\.toml: name a scenario file, or a recorded run with --from"):
        SimulateOptions().tasks()


def test_the_same_seeds_write_the_same_bytes_however_many_at_a_time_and_the_table_compares(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = SimulateOptions(scenario=Path("a.toml"), compare=(Path("b.toml"),), seeds=2)
    assert simulated(replace(options, jobs=1, json=tmp_path / "1.json")) == 0
    assert simulated(replace(options, jobs=2, json=tmp_path / "2.json", png=tmp_path / "2.png")) == 0
    assert (tmp_path / "1.json").read_bytes() == (tmp_path / "2.json").read_bytes()
    assert (tmp_path / "2.png").read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert "step, median" in printed
    assert "seeds 0 to 1" in printed
    found = json.loads((tmp_path / "1.json").read_bytes())
    assert [one["scenario"] for one in found["scenarios"]] == ["a.toml", "b.toml"]
    assert found["scenarios"][0]["seeds"] == [0, 1]


def test_a_refused_scenario_ends_the_command_and_nothing_is_written(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"^x\.toml:3:1: "):
        simulated(SimulateOptions(scenario=Path("refused.toml"), json=tmp_path / "out.json"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("field", ["json", "png"])
def test_a_file_that_cannot_be_written_is_refused_before_anything_is_simulated(tmp_path: Path, field: str) -> None:
    options = replace(SimulateOptions(scenario=Path("crash.toml")), **{field: tmp_path / "none" / "file"})
    with pytest.raises(InvalidRequest, match=f"^--{field}: .* cannot be written"):
        simulated(options)


def test_a_file_on_a_full_disk_is_named() -> None:
    with pytest.raises(
        InvalidRequest, match=r"^/dev/full: cannot be written \(No space left on device\); name another"
    ):
        simulated(SimulateOptions(scenario=Path("a.toml"), json=Path("/dev/full")))


def test_a_seed_that_does_not_fit_is_refused_by_its_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(("simulate", "a.toml", "--seed", "9" * 20))
    assert "--seed" in capsys.readouterr().err


def test_what_is_not_installed_is_named_with_the_extra_that_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(EbbtideError, match=r"needs redis, .* install ebbtide\[simulate\]"):
        simulated(SimulateOptions(scenario=Path("a.toml")))


INTERRUPTED = """
import sys
from pathlib import Path
from tests.unit.cli.test_simulate_command import simulated
from ebbtide.lab_commands.simulation import SimulateOptions
sys.exit(simulated(SimulateOptions(scenario=Path(sys.argv[1]), seeds=3, jobs=2)))
"""


@pytest.mark.parametrize("mode", ["endless", "deaf"])
async def test_ctrl_c_ends_the_command_and_its_processes(tmp_path: Path, mode: str) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", INTERRUPTED, str(tmp_path / f"{mode}.toml"),
        stderr=asyncio.subprocess.PIPE, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    await wait_until(lambda: len(list(tmp_path.glob("*.pid"))) == 2, timeout=20, what="two of three simulations")
    pids = [int(path.read_text()) for path in sorted(tmp_path.glob("*.pid"))]  # noqa: ASYNC240 - a small folder
    process.send_signal(signal.SIGINT)
    _, err = await process.communicate()
    assert (process.returncode, err.splitlines()[-1]) == (130, b"Interrupted; nothing was written.")
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def refused(*words: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2


def test_a_scenario_that_is_none_is_refused_by_file_line_and_column(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "x.toml").write_text('name = "x"\nsteps = 0\n')
    refused("simulate", str(tmp_path / "x.toml"))
    assert "x.toml:2:" in capsys.readouterr().err
    refused("simulate", "--from", str(tmp_path / "none.json"))
    assert "none.json: cannot be read" in capsys.readouterr().err
    refused("simulate")
    assert "name a scenario file" in capsys.readouterr().err


def test_the_list_names_every_model_with_its_gpus_and_every_example_with_its_question(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(("simulate", "--list"))
    assert ended.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    assert {model.name for model in MODELS} <= {line.split(" ", 1)[0] for line in lines}
    assert {gpu.name for gpu in GPUS} <= set(lines[0].split())
    assert next(line.split() for line in lines if line.startswith("Qwen3-32B")) == ["Qwen3-32B", "66", "1", "1"]
    asked = {Path(line.split(" ", 1)[0]).name: line for line in lines if ".toml " in line}
    assert {"first.toml", "spot.toml", "coserving.toml", "shared.toml"} <= set(asked)
    assert asked["first.toml"].rstrip().endswith("what do they cost?")
