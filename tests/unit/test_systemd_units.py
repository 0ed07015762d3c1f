"""The units of `deploy/systemd`: they name real settings, run as nobody special, and wait for a drain to end."""

import shlex
import shutil
import subprocess
import sys
from collections import defaultdict
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import pytest

from ebbtide import settings
from ebbtide.cli.credentials.host_papers import FILES
from ebbtide.rollout_worker.settings import WorkerSettings

UNITS: Final = Path(__file__).parents[2] / "deploy" / "systemd"
SERVICES: Final = sorted(UNITS.glob("*.service"))
#: unit -> program as `python -m` knows it, and its settings.
PROGRAMS: Final = {
    "coordinator": ("ebbtide.coordinator", "ebbtide.coordinator.settings:CoordinatorSettings"),
    "weight-relay": ("ebbtide.weight_relay", "ebbtide.weight_relay.settings:RelaySettings"),
    "rollout-worker": ("ebbtide.rollout_worker", "ebbtide.rollout_worker.settings:WorkerSettings"),
    "trainer": ("ebbtide.trainer", "ebbtide.trainer.settings:TrainerSettings"),
    "driver": ("ebbtide.driver", "ebbtide.driver.settings:DriverSettings"),
    "gateway": ("ebbtide.gateway", "ebbtide.gateway.settings:GatewaySettings"),
    "serving-guard": ("ebbtide.serving_guard", "ebbtide.serving_guard.settings:GuardSettings"),
    "trainer-guard": ("ebbtide.serving_guard", "ebbtide.serving_guard.settings:GuardSettings"),
}
#: They know their own host only.
LENDERS: Final = {"serving-guard", "trainer-guard"}
_SYSTEMD: Final = Path("/usr/lib/systemd/system")
_UNITS_OF_THEM_ALL: Final = Path("etc/systemd/system")

each_service = pytest.mark.parametrize("unit", SERVICES, ids=lambda path: path.stem)
each_example = pytest.mark.parametrize("example", sorted(UNITS.glob("*.env.example")), ids=lambda path: path.name)


def read(path: Path) -> dict[str, list[str]]:
    """key -> its values, of all sections of a unit and of the drop-in that all services share."""
    found: dict[str, list[str]] = defaultdict(list)
    for file in (path, UNITS / "ebbtide-.service.d" / "hardening.conf"):
        for line in file.read_text().splitlines():
            if line and not line.startswith(("#", "[")):
                key, _, value = line.partition("=")
                found[key].append(value)
    return found


def program(unit: Path) -> str:
    return unit.stem.removeprefix("ebbtide-").rstrip("@")


def kind(name: str) -> Any:
    module, _, attribute = PROGRAMS[name][1].partition(":")
    return getattr(import_module(module), attribute)


def variables(name: str) -> set[str]:
    """Every variable that a unit's program reads."""
    prefix = f"{PROGRAMS[name][0].replace('.', '_').upper()}_"
    fields = settings._fields(kind(name))
    return {f"{prefix}CONFIG", *(variable for field in fields for variable in field.variables(prefix))}


def assignments(text: str) -> dict[str, str]:
    pairs = (line.partition("=") for line in text.splitlines() if line and not line.startswith("#"))
    return {name: value for name, _, value in pairs}


def made(name: str, given: dict[str, str]) -> Any:
    """The settings of a unit's program: `given`, and what the unit itself sets where systemd fills nothing in."""
    keys = read(UNITS / f"ebbtide-{name}{'@' * (name == 'rollout-worker')}.service")
    own = assignments("\n".join(keys["Environment"]))
    known = {key: value for key, value in own.items() if "%" not in value}
    module, flags = PROGRAMS[name][0], shlex.split(keys["ExecStart"][0])[3:]
    prog = f"ebbtide {module.removeprefix('ebbtide.').replace('_', '-')}"
    return settings.read(kind(name), prog=prog, argv=flags, environ=known | given)


def seconds(span: str) -> float:
    number, unit = (span[:-3], 60.0) if span.endswith("min") else (span, 1.0)
    return float(number) * unit


def test_there_is_a_unit_for_every_program() -> None:
    assert {program(unit) for unit in SERVICES} == set(PROGRAMS)


@each_service
def test_a_unit_starts_its_program_with_settings_that_exist(unit: Path) -> None:
    (line,) = read(unit)["ExecStart"]
    name = program(unit)
    python, dash_m, module, *flags = shlex.split(line)
    assert (python, dash_m, module) == ("/opt/ebbtide/bin/python", "-m", PROGRAMS[name][0])
    known = {"--config", *(field.flag for field in settings._fields(kind(name)))}
    assert known >= {flag for flag in flags if flag.startswith("--")}
    for variable in (pair.partition("=")[0] for pair in read(unit)["Environment"]):
        assert variable in variables(name) | {"HOME"}


@each_service
def test_no_unit_runs_as_root_or_may_gain_rights(unit: Path) -> None:
    keys = read(unit)
    assert keys["User"] == ["ebbtide"]
    assert keys["CapabilityBoundingSet"] == [""]
    assert keys["NoNewPrivileges"] == ["true"]
    assert keys["ProtectSystem"] == ["strict"]


@each_service
def test_every_unit_bounds_what_it_takes(unit: Path) -> None:
    assert {"MemoryMax", "TasksMax", "LimitNOFILE", "CPUWeight", "TimeoutStopSec"} <= read(unit).keys()


@each_service
def test_a_unit_whose_settings_are_bad_is_not_started_again(unit: Path) -> None:
    assert read(unit)["RestartPreventExitStatus"] == ["2"]


def test_systemd_waits_longer_than_a_worker_drains() -> None:
    keys = read(UNITS / "ebbtide-rollout-worker@.service")
    example = assignments((UNITS / "rollout-worker.env.example").read_text())
    drain_s = float(example["EBBTIDE_ROLLOUT_WORKER_DRAIN_TIMEOUT_S"])
    assert drain_s == WorkerSettings(worker_id="w").drain_timeout_s
    # The rest: an engine that ends, and a failed process, which is given ten seconds.
    assert seconds(keys["TimeoutStopSec"][0]) >= drain_s + 10
    assert keys["KillMode"] == ["mixed"], "the engine's processes have to live while the worker hands over"
    assert keys["KillSignal"] in ([], ["SIGTERM"])


def test_systemd_waits_longer_than_a_gateways_requests_may_finish() -> None:
    example = assignments((UNITS / "gateway.env.example").read_text())
    stop_s = seconds(read(UNITS / "ebbtide-gateway.service")["TimeoutStopSec"][0])
    assert stop_s >= float(example["EBBTIDE_GATEWAY_DRAIN_S"]) + 10


@each_example
def test_an_example_names_settings_that_exist_and_are_valid(example: Path) -> None:
    name = example.name.removesuffix(".env.example")
    given = {key: value for key, value in assignments(example.read_text()).items() if key.startswith("EBBTIDE_")}
    readers = [name] if name in PROGRAMS else [key for key in PROGRAMS if key not in LENDERS]
    assert given.keys() <= set().union(*map(variables, readers))
    for reader in readers:
        found = made(reader, given)
        if reader in LENDERS:
            found.checked()


def test_each_guard_lends_the_device_of_its_own_owner_by_settings_of_its_own() -> None:
    files = [*read(UNITS / "ebbtide-serving-guard.service")["EnvironmentFile"]]
    files += read(UNITS / "ebbtide-trainer-guard.service")["EnvironmentFile"]
    assert len(set(files)) == 2
    given = {name: assignments((UNITS / f"{name}.env.example").read_text()) for name in LENDERS}
    assert {name: made(name, given[name]).owner for name in LENDERS} == {
        "serving-guard": "server",
        "trainer-guard": "trainer",
    }
    ports = [made(name, given[name]).metrics_port for name in LENDERS]
    assert len(set(ports)) == 2, "one host may have both"


def test_the_guard_of_a_served_engine_is_enabled_started_and_restarted_with_the_socket_that_systemd_holds() -> None:
    keys = read(UNITS / "ebbtide-serving-guard.service")
    for key in ("Requires", "After", "Also"):
        assert "ebbtide-serving-guard.socket" in " ".join(keys[key]).split(), key
    assert "ebbtide-serving-guard.socket" not in (UNITS / "ebbtide-trainer-guard.service").read_text()


def test_every_program_that_is_told_of_a_coordinator_is_given_papers_by_the_names_that_hosts_get() -> None:
    for name in PROGRAMS.keys() - LENDERS:
        if "EBBTIDE_COORDINATOR" in variables(name):
            given = assignments((UNITS / f"{name}.env.example").read_text())
            papers = [Path(given[f"EBBTIDE_{kind}"]) for kind in ("TOKEN_FILE", "TLS_CERT", "TLS_KEY")]
            assert [path.suffix for path in papers] == [".token", ".pem", ".key"]
            assert {path.stem for path in papers} <= set(FILES.values())


@each_service
def test_every_settings_file_that_a_unit_needs_has_an_example(unit: Path) -> None:
    for path in read(unit)["EnvironmentFile"]:
        if not path.startswith("-"):
            assert (UNITS / f"{Path(path).name}.example").is_file()


def test_systemd_finds_nothing_to_object_to(tmp_path: Path) -> None:
    """In a root of its own, which has what the units name: a Python, the user's Redis, and systemd's own units."""
    if not (analyze := shutil.which("systemd-analyze")) or not _SYSTEMD.is_dir():
        pytest.skip("systemd-analyze is not installed")
    shutil.copytree(_SYSTEMD, tmp_path / "usr/lib/systemd/system", symlinks=True)
    python = tmp_path / "opt/ebbtide/bin/python"
    python.parent.mkdir(parents=True)
    shutil.copyfile(sys.executable, python)
    python.chmod(0o755)
    shutil.copytree(UNITS, tmp_path / _UNITS_OF_THEM_ALL)
    units = [path.name.replace("@.", "@0.") for path in [*SERVICES, *UNITS.glob("*.socket")]]
    command = [analyze, "verify", "--man=no", f"--root={tmp_path}", *units]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
