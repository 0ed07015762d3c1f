"""What docker-compose.yml promises: a whole cluster, nothing off the loopback, no rights to spare, real settings."""

import os
import re
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from ebbtide.auth.role_tokens import public_keys, verify
from ebbtide.auth.roles import Role
from ebbtide.cli.__main__ import app
from ebbtide.cli.commands.serve import SERVICES as COMMANDS
from ebbtide.cli.credentials.signing_keys import issue
from ebbtide.client.client import read_spec
from ebbtide.coordinator.settings import CoordinatorSettings
from ebbtide.driver.settings import DriverSettings
from ebbtide.gateway.settings import GatewaySettings
from ebbtide.gpu_memory import GpuDevice
from ebbtide.local_cluster.gpu_placement import EngineNeed, place_devices
from ebbtide.rollout_worker.settings import VllmSettings, WorkerSettings
from ebbtide.serving_guard.settings import GuardSettings
from ebbtide.settings import read
from ebbtide.trainer.settings import TrainerSettings
from ebbtide.types.fleet import WorkerKind
from ebbtide.types.run import check_spec
from ebbtide.weight_relay.settings import RelaySettings

ROOT = Path(__file__).parents[2]
#: ${NAME:-default}
FILLED_IN = re.compile(r"\$\{[A-Z_]+:-([^}]*)\}")
KINDS: dict[str, type[msgspec.Struct]] = {
    "ebbtide.coordinator": CoordinatorSettings,
    "ebbtide.rollout_worker": WorkerSettings,
    "ebbtide.trainer": TrainerSettings,
    "ebbtide.driver": DriverSettings,
    "ebbtide.weight_relay": RelaySettings,
    "ebbtide.gateway": GatewaySettings,
    "ebbtide.serving_guard": GuardSettings,
}
#: They find each other's processes, so they share process ids.
LENDING = {"trainer-guard", "trainer-generate", "worker-generate"}
COSERVING = {"serving-guard", "worker-borrowed"}
#: They know their own host only, and ask for no token.
LENDERS = {"trainer-guard", "serving-guard"}
#: service whose process ids are shared -> by whom
PIDS = {"serving-pids": COSERVING, "device-pids": LENDING}
#: Services of nobody's settings: other people's programs, and commands.
NOT_OURS = {"redis", "serving-engine", "setup", "cli", "traffic", *PIDS}
#: They end by themselves.
COMMANDS_ALONE = {"setup", "cli"}
#: What `docker compose up` starts, and what each profile adds.
PLAIN = {"setup", "redis", "coordinator", "weight-relay", "gateway", "driver", "trainer", "worker-1", "worker-2"}
ADDED = {
    "cli": {"cli"},
    "coserving": {"serving-engine", "serving-pids", "traffic", *COSERVING},
    "generate": {"device-pids", *LENDING},
    "gpu": {"trainer-gpu", "worker-gpu"},
}
WORKERS = sorted(name for name in {*PLAIN, *set().union(*ADDED.values())} if name.startswith("worker-"))
SECRETS = {
    "token": "/secrets/cluster",
    "store-password": "/secrets/store",
    "token-keys": "/secrets/keys",
    "public-keys": "/secrets/public",
}
PAGE = (ROOT / "docs/deploy/compose.md").read_text()
DOCKERFILE = (ROOT / "deploy/docker/Dockerfile").read_text()


def compose() -> dict[str, Any]:
    """The file with all defaults filled in."""
    text = (ROOT / "docker-compose.yml").read_text()
    found: dict[str, Any] = yaml.safe_load(FILLED_IN.sub(r"\1", text))
    return found


FILE = compose()
SERVICES: dict[str, dict[str, Any]] = FILE["services"]
OURS = sorted(set(SERVICES) - NOT_OURS)


def seconds(text: str) -> float:
    """Of a duration such as 35s or 5m."""
    return float(text[:-1]) * {"s": 1, "m": 60}[text[-1]]


def mounts(name: str) -> dict[str, tuple[str, bool]]:
    """volume or path -> where a service has it, and whether it may write there."""
    found = [volume.split(":") for volume in SERVICES[name].get("volumes", [])]
    return {source: (target, mode != ["ro"]) for source, target, *mode in found}


def needs(name: str) -> dict[str, str]:
    """service -> what has to be true of it before this one is started."""
    return {other: one["condition"] for other, one in SERVICES[name].get("depends_on", {}).items()}


def module(name: str) -> str:
    """What a service runs."""
    found: list[str] = re.findall(r"ebbtide\.[a-z_.]+", " ".join(SERVICES[name]["command"]))
    return found[-1]


def loaded(name: str) -> Any:
    """The settings with which a service starts. Raises `InvalidRequest` for a variable that is no setting."""
    (command,) = [command for command, one in COMMANDS.items() if one.module == f"{module(name)}.__main__"]
    return read(KINDS[module(name)], prog=f"ebbtide serve {command}", argv=[], environ=SERVICES[name]["environment"])


@pytest.mark.parametrize("name", SERVICES)
def test_a_port_is_published_on_the_loopback_alone(name: str) -> None:
    for port in SERVICES[name].get("ports", []):
        assert re.fullmatch(r"127\.0\.0\.1:\d+:\d+", port)


def test_the_store_is_reached_from_inside_alone_with_a_password_that_the_coordinator_has() -> None:
    assert "ports" not in SERVICES["redis"]
    assert "/secrets/store/password" in " ".join(SERVICES["redis"]["command"])
    assert loaded("coordinator").store_password_file == "/secrets/store/password"


@pytest.mark.parametrize("name", SERVICES)
def test_no_container_has_rights_to_spare(name: str) -> None:
    service = SERVICES[name]
    assert service["user"].split(":") == ["10001", "10001"]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert not {"privileged", "cap_add", "network_mode", "ipc"} & set(service)


def test_process_ids_are_shared_by_who_lends_and_who_borrows_alone_and_in_no_container_that_has_more() -> None:
    shared = {name: service["pid"] for name, service in SERVICES.items() if "pid" in service}
    wanted = {name: f"container:{SERVICES[holder]['container_name']}" for holder in PIDS for name in PIDS[holder]}
    assert shared == wanted
    for holder in PIDS:
        assert not {"volumes", "environment", "ports"} & set(SERVICES[holder]), "nothing to see there"
    for name in shared:
        (holder,) = set(needs(name)) & set(PIDS)
        assert name in PIDS[holder]


@pytest.mark.parametrize("name", sorted(set(SERVICES) - COMMANDS_ALONE))
def test_every_service_that_stays_has_a_health_check_and_is_started_again(name: str) -> None:
    check = SERVICES[name]["healthcheck"]
    assert check["test"][0] in {"CMD", "CMD-SHELL"}
    assert {"interval", "timeout", "retries", "start_period"} <= set(check)
    assert SERVICES[name]["restart"] == "unless-stopped"


@pytest.mark.parametrize("name", OURS)
def test_every_variable_is_a_setting_of_the_service(name: str) -> None:
    environment = SERVICES[name]["environment"]
    settings = loaded(name)
    shared = {"EBBTIDE_TOKEN_FILE", "EBBTIDE_ALLOW_INSECURE", "EBBTIDE_COORDINATOR", "EBBTIDE_RELAY"}
    prefix = f"EBBTIDE_{module(name).removeprefix('ebbtide.').split('.')[-1].upper()}_"
    assert {key for key in environment if key.startswith("EBBTIDE_")} <= shared | {
        key for key in environment if key.startswith(prefix)
    }
    assert settings.log_level == "info"


@pytest.mark.parametrize("name", sorted(set(OURS) - LENDERS))
def test_a_service_finds_the_token_and_the_others_by_their_names(name: str) -> None:
    settings = loaded(name)
    security = next(getattr(settings, field) for field in ("server", "client", "security") if hasattr(settings, field))
    assert security.token == ""
    assert security.token_file == "/secrets/cluster/token"
    assert mounts(name)["token"] == ("/secrets/cluster", False)
    for field in {"coordinator", "relay"} & set(settings.__struct_fields__):
        host, _, port = getattr(settings, field).rpartition(":")
        assert SERVICES[host]["ports"][0].endswith(f":{port}")


def test_secrets_are_made_by_setup_read_by_those_who_need_them_and_in_no_file() -> None:
    readers = {secret: {name for name in SERVICES if secret in mounts(name)} for secret in SECRETS}
    assert readers["store-password"] == {"setup", "redis", "coordinator"}
    assert readers["token-keys"] == {"setup", "cli"}
    assert readers["public-keys"] == {"setup", "gateway"}
    assert not readers["token"] & {"redis", "serving-engine", "traffic", *LENDERS}
    for secret, folder in SECRETS.items():
        assert all(mounts(name)[secret] == (folder, name == "setup") for name in readers[secret])
    assert "secrets" not in FILE
    assert "EBBTIDE_TOKEN:" not in (ROOT / "docker-compose.yml").read_text()


def test_what_begins_needs_nothing_but_what_is_ready() -> None:
    for name, service in SERVICES.items():
        for other, condition in needs(name).items():
            wanted = "service_completed_successfully" if other == "setup" else "service_healthy"
            assert condition == wanted, f"{name} behind {other}"
            started_with = set(SERVICES[other].get("profiles", []))
            assert started_with <= set(service.get("profiles", [])), f"the profile of {name} does not start {other}"
    assert all(behind(name) for name in set(SERVICES) - {"setup"})


def behind(name: str, *seen: str) -> bool:
    """Whether a service is started after setup. Fails for a circle."""
    assert name not in seen, f"a circle: {seen}"
    before = [behind(other, *seen, name) for other in needs(name)]  # all, for circles
    return name == "setup" or any(before)


@pytest.mark.parametrize(("volume", "group"), [("grants", LENDING), ("serving-grants", COSERVING)])
def test_lender_and_borrower_of_one_device_meet_in_one_folder(volume: str, group: set[str]) -> None:
    folders = {loaded(name).grant_dir for name in group}
    assert len(folders) == 1
    assert {name for name in SERVICES if volume in mounts(name)} - {"cli"} == group
    assert folders.pop().startswith(f"/var/lib/ebbtide/{volume}/"), "a folder below it can have the mode that it needs"


def test_who_lends_what() -> None:
    assert {name: loaded(name).owner for name in LENDERS} == {"serving-guard": "server", "trainer-guard": "trainer"}
    for name in LENDERS:
        loaded(name).checked()
    assert loaded("trainer-generate").generate
    borrowers = {name for name in WORKERS if loaded(name).kind is WorkerKind.BORROWED}
    assert borrowers == {"worker-borrowed", "worker-generate"}
    assert loaded("serving-guard").upstream == "http://serving-engine:8000"
    assert SERVICES["traffic"]["command"][3:5] == ["--url", "http://serving-guard:8100"], "not past the guard"


def test_the_guards_screen_is_one_command() -> None:
    assert SERVICES["cli"]["environment"]["EBBTIDE_GRANT_DIR"] == loaded("serving-guard").grant_dir
    assert mounts("cli")["serving-grants"] == ("/var/lib/ebbtide/serving-grants", False)


@pytest.mark.parametrize("name", WORKERS)
def test_a_worker_has_time_to_hand_over_and_to_end_its_engine(name: str) -> None:
    assert seconds(SERVICES[name]["stop_grace_period"]) >= loaded(name).drain_timeout_s + 10


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_that_stops_is_given_time(name: str) -> None:
    assert seconds(SERVICES[name]["stop_grace_period"]) >= 30


@pytest.mark.parametrize("name", [*WORKERS, "trainer", "trainer-gpu", "trainer-generate", "driver", "trainer-guard"])
def test_what_a_health_check_looks_at_is_what_the_service_was_told_to_write(name: str) -> None:
    settings, (*_, script) = loaded(name), SERVICES[name]["healthcheck"]["test"]
    assert f"os.stat('{settings.ready_file}')" in script
    assert f":{settings.metrics_port}/metrics" in script
    compile(script, name, "exec")


@pytest.mark.parametrize(("name", "port"), [("coordinator", 7600), ("weight-relay", 7610)])
def test_a_servers_health_is_asked_where_it_listens(name: str, port: int) -> None:
    assert loaded(name).server.listen == f"0.0.0.0:{port}"
    assert SERVICES[name]["healthcheck"]["test"][-1] == f"127.0.0.1:{port}"


def test_a_gateways_health_is_asked_where_it_listens_and_its_requests_may_finish() -> None:
    settings, service = loaded("gateway"), SERVICES["gateway"]
    assert settings.listen == "0.0.0.0:7640"
    assert "http://127.0.0.1:7640/health" in service["healthcheck"]["test"][-1]
    assert seconds(service["stop_grace_period"]) >= settings.drain_s + 10


def test_a_guards_health_is_asked_where_it_listens_and_its_requests_may_finish() -> None:
    settings, service = loaded("serving-guard"), SERVICES["serving-guard"]
    assert settings.listen == "0.0.0.0:8100"
    assert "http://127.0.0.1:8100/ebbtide/health" in service["healthcheck"]["test"][-1]
    assert seconds(service["stop_grace_period"]) >= settings.proxy.drain_s + 10


def test_a_gateway_reads_models_where_the_trainer_may_take_them_from_and_writes_none() -> None:
    assert loaded("gateway").model_roots == loaded("trainer").model_roots
    assert not any(writes for _, writes in mounts("gateway").values())


def test_a_gateway_alone_takes_tokens_that_agents_may_have() -> None:
    assert loaded("gateway").door.token_keys == "/secrets/public/tokens.pub"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """In which `ebbtide-setup` has not run."""
    for folder in SECRETS.values():
        (tmp_path / folder[1:]).mkdir(parents=True)
    return tmp_path


def set_up(root: Path, **environment: str) -> "subprocess.CompletedProcess[str]":
    """Run `ebbtide-setup` below a root, which stands for models that are there."""
    script = (ROOT / "deploy/docker/ebbtide-setup").read_text()
    for folder in ("/secrets/", "/models"):
        script = script.replace(folder, f"{root}{folder}")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    models = {"EBBTIDE_MODEL": str(root), "EBBTIDE_SERVED_MODEL": str(root)}
    environment = os.environ | {"PATH": path} | models | environment
    return subprocess.run(["sh", "-c", script], env=environment, check=False, capture_output=True, text=True)


@pytest.fixture
def prepared(root: Path) -> Path:
    """A root in which `ebbtide-setup` has run twice, with a model there already."""

    def made() -> dict[Path, bytes]:
        done = set_up(root)
        assert done.returncode == 0, done.stderr
        return {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}

    assert made() == made(), "what is there stays"
    return root


def test_setup_makes_secrets_that_only_its_user_reads(prepared: Path) -> None:
    files = {path for path in (prepared / "secrets").rglob("*") if path.is_file()}
    names = {"cluster/token", "store/password", "keys/tokens.key", "keys/tokens.pub", "public/tokens.pub"}
    assert {str(path.relative_to(prepared / "secrets")) for path in files} == names
    secret = [path for path in files if path.name != "tokens.pub"]
    assert all(path.stat().st_mode & 0o077 == 0 for path in secret)
    assert all(len(path.read_text()) == 64 for path in secret if path.name != "tokens.key")
    assert len({path.read_bytes() for path in secret}) == 3


def test_agents_keys_of_setup_are_those_that_the_gateway_takes(prepared: Path) -> None:
    keys = public_keys((prepared / "secrets/public/tokens.pub").read_bytes(), field="keys")
    claims = verify(issue(prepared / "secrets/keys", Role.AGENT, run_id="r", ttl_s=60, name="team"), keys)
    assert (claims.role, claims.run_id) == (Role.AGENT, "r")


@pytest.mark.parametrize("half", ["keys/tokens.pub", "keys/tokens.key", "store/password", "cluster/token.new"])
def test_setup_goes_on_where_it_was_killed(root: Path, half: str) -> None:
    """Between the two files of a pair, or within a file."""
    if half == "keys/tokens.key":
        assert set_up(root).returncode == 0
        (root / "secrets/public/tokens.pub").unlink()
    else:
        (root / "secrets" / half).write_text("" if half == "store/password" else "half")
    done = set_up(root)
    assert done.returncode == 0, done.stderr
    keys = public_keys((root / "secrets/public/tokens.pub").read_bytes(), field="keys")
    assert verify(issue(root / "secrets/keys", Role.AGENT, run_id="r", ttl_s=60, name="team"), keys)
    assert all(len((root / "secrets" / name).read_text()) == 64 for name in ("store/password", "cluster/token"))


def test_setup_names_the_model_that_lacks_and_ends_as_no_start_again_would_mend_it(root: Path) -> None:
    assert SERVICES["setup"]["restart"] == "no"
    typo = set_up(root, EBBTIDE_MODEL=f"{root}/models/bass-model")
    assert typo.returncode == 1
    assert "EBBTIDE_MODEL names" in typo.stderr
    assert not (root / "models").exists(), "nothing is made under a name that somebody chose"
    other = set_up(root, EBBTIDE_SERVED_MODEL=f"{root}/models/mine")
    assert (other.returncode, "EBBTIDE_SERVED_MODEL names" in other.stderr) == (1, True)
    unwritable = set_up(root, EBBTIDE_MODEL=f"{root}/models/base-model")
    assert unwritable.returncode == 1
    assert "may not write there" in unwritable.stderr
    assert not (root / "secrets/cluster/token").exists(), "nothing else starts"


def test_setup_makes_the_token_last_which_all_others_wait_for() -> None:
    lines = [line for line in (ROOT / "deploy/docker/ebbtide-setup").read_text().splitlines() if line]
    assert lines[-2:] == ["secret /secrets/cluster/token", 'echo "setup is done"']


def test_a_container_waits_for_its_file_and_becomes_its_program(tmp_path: Path) -> None:
    (file := tmp_path / "token").write_text("x")
    environment = {"PATH": os.environ["PATH"], "EBBTIDE_TOKEN_FILE": str(tmp_path / "none"), "START_AFTER": str(file)}
    script = str(ROOT / "deploy/docker/ebbtide-start")
    done = subprocess.run([script, "sh", "-c", "exit 7"], env=environment, capture_output=True, check=False, timeout=20)
    assert done.returncode == 7
    del environment["START_AFTER"]
    with subprocess.Popen([script, "true"], env=environment, stdout=subprocess.PIPE) as waiting:
        assert waiting.stdout is not None
        assert b"which the container setup makes" in waiting.stdout.readline()
        assert waiting.poll() is None
        waiting.terminate()
        assert waiting.wait(timeout=20) == 0


def test_the_store_writes_before_it_answers() -> None:
    (command,) = SERVICES["redis"]["command"]
    assert "--appendonly yes" in command
    assert "--appendfsync always" in command
    assert "--maxmemory-policy noeviction" in command


def test_up_alone_is_a_whole_cluster_and_profiles_add_to_it() -> None:
    assert {name for name, service in SERVICES.items() if "profiles" not in service} == PLAIN
    for profile, wanted in ADDED.items():
        assert {name for name, service in SERVICES.items() if profile in service.get("profiles", [])} == wanted


def test_the_page_takes_down_what_any_profile_has_started_and_lists_every_variable() -> None:
    page = (ROOT / "docs/deploy/compose.md").read_text()
    commands = [line.partition("#")[0] for line in page.splitlines() if line.startswith("docker compose --profile")]
    downs = [line for line in commands if " down" in line]
    assert [set(re.findall(r"--profile (\w+)", line)) for line in downs] == [set(ADDED), set(ADDED)]
    assert [line.split("down")[1].strip() for line in downs] == ["", "--volumes"]
    rows = "\n".join(line for line in page.splitlines() if line.startswith("| `"))
    listed = set(re.findall(r"`([A-Z_]+)`", rows))
    assert set(re.findall(r"\$\{([A-Z_]+):-", (ROOT / "docker-compose.yml").read_text())) <= listed


def test_gpus_are_reserved_by_the_gpu_profile_alone_each_by_its_id() -> None:
    assert {name for name, service in SERVICES.items() if "deploy" in service} == ADDED["gpu"]
    reserved = [SERVICES[name]["deploy"]["resources"]["reservations"]["devices"] for name in sorted(ADDED["gpu"])]
    assert [device["device_ids"] for (device,) in reserved] == [["0"], ["1"]]
    assert {name for name, service in SERVICES.items() if service.get("shm_size")} == {*WORKERS, "serving-engine"}


def test_on_cards_trainer_and_worker_are_where_up_puts_them_and_on_one_card_their_sizes_add_up() -> None:
    trainer, worker = ({"0"}, {"1"})
    placement = place_devices(imitated(2), [need(0)], ranks=1, trainer_bytes=0)
    assert [{str(device.index) for device in share.devices} for share in placement.values()] == [trainer, worker]
    kv_mib, fraction = map(float, re.findall(r"these\nare (\d+) and (\d\.\d+);", PAGE)[0])
    shared = place_devices(imitated(1), [need(int(kv_mib))], ranks=1, trainer_bytes=11 * 10**9)["worker"]
    assert shared.kv_cache_mib == kv_mib
    assert fraction - 0.01 < shared.utilization <= fraction
    assert loaded("worker-gpu").vllm == VllmSettings()


def need(kv_mib: int) -> EngineNeed:
    """Of a worker with Qwen3-0.6B in bf16."""
    return EngineNeed(name="worker", weights_bytes=1_200_000_000, kv_cache_mib=kv_mib)


def imitated(count: int) -> list[GpuDevice]:
    size = 80 * 10**9
    return [
        GpuDevice(index=index, uuid=f"GPU-{index}", name="H100", total_bytes=size, free_bytes=size)
        for index in range(count)
    ]


def test_every_volume_is_named_and_made_for_the_containers_user() -> None:
    named = {source: target for name in SERVICES for source, (target, _) in mounts(name).items() if source[0] != "."}
    assert set(named) == set(FILE["volumes"])
    made = "WORKDIR /var/lib/ebbtide\\nRUN mkdir -p (.+?)&& chown -R 10001:10001 /var/lib/ebbtide /models /secrets$"
    by_image = re.findall(made, DOCKERFILE, re.MULTILINE | re.DOTALL)
    assert len(by_image) == 2, "whichever image is started first, its folders give a volume its owner"
    for words in by_image:
        folders = {str(Path("/var/lib/ebbtide") / folder) for folder in words.replace("\\", "").split()}
        assert set(named.values()) <= folders


def test_an_image_is_built_by_whichever_of_its_services_is_started() -> None:
    built = {name: service["build"]["target"] for name, service in SERVICES.items() if "build" in service}
    assert built == {"setup": "cluster", "trainer-gpu": "gpu", "worker-gpu": "gpu"}
    assert set(built.values()) <= set(re.findall(r"^FROM \S+ AS (\S+)$", DOCKERFILE, re.MULTILINE))
    images = {name: service["image"] for name, service in SERVICES.items()}
    assert {name for name, image in images.items() if image == "ebbtide-gpu"} == ADDED["gpu"]
    assert set(images.values()) == {"ebbtide", "ebbtide-gpu"}


def test_what_an_image_starts_is_in_the_context_of_its_build() -> None:
    for line in re.findall(r"^COPY (?!--from)(.+)$", DOCKERFILE, re.MULTILINE):
        *sources, target = [word for word in line.split() if not word.startswith("--")]
        assert all((ROOT / source).exists() for source in sources)
        if target.startswith("/usr/local/"):  # what user 10001 reads, whatever the cloner's umask
            assert line.startswith("--chmod=0755 " if target.endswith("/bin/") else "--chmod=0644 ")
    ignored = (ROOT / ".dockerignore").read_text()
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"][
        "packages"
    ]
    code = {f"!{Path(package).parts[0]}" for package in packages}
    assert {*code, "!deploy/docker/ebbtide-*", "!examples/compose.toml"} <= set(ignored.splitlines())
    assert "COPY --chmod=0644 examples/compose.toml /usr/local/share/ebbtide-compose.toml" in DOCKERFILE
    assert "--spec /usr/local/share/ebbtide-compose.toml" in (ROOT / "deploy/docker/ebbtide-setup").read_text()
    assert all(os.access(path, os.X_OK) for path in (ROOT / "deploy/docker").glob("ebbtide-*"))


def test_every_module_that_is_started_is_there() -> None:
    for name in OURS:
        assert import_module(f"{module(name)}.__main__")
    assert import_module(module("traffic"))
    assert app.info.name == SERVICES["cli"]["entrypoint"][0]


def test_the_example_begins_with_the_model_that_is_made() -> None:
    spec = check_spec(read_spec(ROOT / "examples/compose.toml"))
    assert {loaded(name).model for name in WORKERS} == {spec.model}
    assert spec.model == SERVICES["setup"]["environment"]["EBBTIDE_MODEL"]
    assert SERVICES["serving-engine"]["command"][2] == SERVICES["setup"]["environment"]["EBBTIDE_SERVED_MODEL"]
