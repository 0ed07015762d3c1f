"""What docker-compose.yml promises: nothing off the loopback, no rights to spare, and settings that exist."""

import re
import shutil
import subprocess
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from ebbtide.auth.role_tokens import public_keys, verify
from ebbtide.auth.roles import Role
from ebbtide.cli.commands.service_commands import SERVICES as COMMANDS
from ebbtide.cli.credentials.signing_keys import issue
from ebbtide.client.client import read_spec
from ebbtide.coordinator.settings import CoordinatorSettings
from ebbtide.device_arbiter.settings import ArbiterSettings
from ebbtide.driver.settings import DriverSettings
from ebbtide.gateway.settings import GatewaySettings
from ebbtide.rollout_worker.settings import WorkerSettings
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
    "ebbtide.device_arbiter": ArbiterSettings,
}
#: They find each other's processes, so they share process ids. The host's are there however often one is started again.
LENDING = {"device-arbiter", "trainer-generate", "worker-generate"}
#: How long Redis and a one-shot job may take is not ours to say.
NOT_OURS = {"redis", "base-model"}


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


def module(name: str) -> str:
    """What a service runs."""
    found: list[str] = re.findall(r"ebbtide\.[a-z_.]+", " ".join(SERVICES[name]["command"]))
    return found[-1]


def loaded(name: str) -> Any:
    """The settings with which a service starts. Raises `InvalidRequest` for a variable that is no setting."""
    (command,) = [command for command, (found, _) in COMMANDS.items() if found == module(name)]
    return read(KINDS[module(name)], prog=f"ebbtide {command}", argv=[], environ=SERVICES[name]["environment"])


@pytest.mark.parametrize("name", SERVICES)
def test_a_port_is_published_on_the_loopback_alone(name: str) -> None:
    for port in SERVICES[name].get("ports", []):
        assert re.fullmatch(r"127\.0\.0\.1:\d+:\d+", port)


def test_the_store_is_reached_from_inside_alone_with_a_password_that_the_coordinator_has() -> None:
    assert "ports" not in SERVICES["redis"]
    assert SERVICES["redis"]["secrets"] == ["store-password"]
    assert loaded("coordinator").store_password_file == "/run/secrets/store-password"


@pytest.mark.parametrize("name", SERVICES)
def test_no_container_has_rights_to_spare(name: str) -> None:
    service = SERVICES[name]
    assert service["user"].split(":") == ["10001", "10001"]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert not {"privileged", "cap_add", "network_mode", "ipc"} & set(service)
    assert service.get("pid") == ("host" if name in LENDING else None)


@pytest.mark.parametrize("name", sorted(set(SERVICES) - {"base-model"}))
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


@pytest.mark.parametrize("name", sorted(set(OURS) - {"device-arbiter"}))
def test_a_service_finds_the_token_and_the_others_by_their_names(name: str) -> None:
    settings = loaded(name)
    security = next(getattr(settings, field) for field in ("server", "client", "security") if hasattr(settings, field))
    assert security.token == ""
    assert security.token_file == "/run/secrets/token"
    further = {"coordinator": ["store-password"], "gateway": ["token-keys"]}
    assert SERVICES[name]["secrets"] == ["token", *further.get(name, [])]
    for field in {"coordinator", "relay"} & set(settings.__struct_fields__):
        host, _, port = getattr(settings, field).rpartition(":")
        assert SERVICES[host]["ports"][0].endswith(f":{port}")


def test_there_is_no_secret_in_the_file() -> None:
    files = {"token": "token", "store-password": "store-password", "token-keys": "tokens.pub"}
    assert FILE["secrets"] == {name: {"file": f"./runs/compose/{file}"} for name, file in files.items()}
    assert "EBBTIDE_TOKEN:" not in (ROOT / "docker-compose.yml").read_text()


@pytest.mark.parametrize("name", SERVICES)
def test_nothing_relies_on_the_order_of_starts(name: str) -> None:
    assert "depends_on" not in SERVICES[name]


def test_trainer_worker_and_arbiter_of_one_device_meet_in_one_folder_and_no_other_service_does() -> None:
    folders = {loaded(name).grant_dir for name in LENDING}
    assert len(folders) == 1
    mounted = {
        name for name, service in SERVICES.items() if "grants:/var/lib/ebbtide/grants" in service.get("volumes", [])
    }
    assert mounted == LENDING
    assert folders.pop().startswith("/var/lib/ebbtide/grants/"), "a folder below it can have the mode that it needs"
    assert loaded("trainer-generate").generate
    assert loaded("worker-generate").kind is WorkerKind.BORROWED
    assert "secrets" not in SERVICES["device-arbiter"], "it asks for no token and needs none"


@pytest.mark.parametrize("name", ["worker", "worker-generate", "worker-gpu"])
def test_a_worker_has_time_to_hand_over_and_to_end_its_engine(name: str) -> None:
    assert seconds(SERVICES[name]["stop_grace_period"]) >= loaded(name).drain_timeout_s + 10


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_that_stops_is_given_time(name: str) -> None:
    assert seconds(SERVICES[name]["stop_grace_period"]) >= 30


@pytest.mark.parametrize("name", ["worker", "worker-gpu", "trainer", "trainer-gpu", "driver", *sorted(LENDING)])
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


def test_a_gateway_reads_models_where_the_trainer_may_take_them_from_and_writes_none() -> None:
    assert loaded("gateway").model_roots == loaded("trainer").model_roots
    assert all(volume.endswith(":ro") for volume in SERVICES["gateway"]["volumes"])


def test_a_gateway_alone_takes_tokens_that_agents_may_have() -> None:
    assert loaded("gateway").door.token_keys == "/run/secrets/token-keys"
    assert [name for name, service in SERVICES.items() if "token-keys" in service.get("secrets", [])] == ["gateway"]


@pytest.mark.skipif(not shutil.which("make") or not shutil.which("openssl"), reason="needs make and openssl")
def test_what_make_prepares_for_the_containers_is_made_once_and_signs_tokens_of_agents(tmp_path: Path) -> None:
    command = ["make", "--silent", "--directory", str(tmp_path), "--file", str(ROOT / "Makefile"), "compose-token"]
    subprocess.run(command, check=True, capture_output=True)
    made = tmp_path / "runs" / "compose"
    files = {path.name: path.read_bytes() for path in made.iterdir()}
    assert set(files) == {"token", "store-password", "tokens.key", "tokens.pub"}
    assert [oct(path.stat().st_mode & 0o777) for path in (made, made / "tokens.key")] == ["0o700", "0o600"]
    keys = public_keys((made / "tokens.pub").read_bytes(), field="keys")
    claims = verify(issue(made, Role.AGENT, run_id="r", ttl_s=60, name="team"), keys)
    assert (claims.role, claims.run_id) == (Role.AGENT, "r")
    subprocess.run(command, check=True, capture_output=True)
    assert {path.name: path.read_bytes() for path in made.iterdir()} == files


def test_the_store_writes_before_it_answers() -> None:
    (command,) = SERVICES["redis"]["command"]
    assert "--appendonly yes" in command
    assert "--appendfsync always" in command
    assert "--maxmemory-policy noeviction" in command


@pytest.mark.parametrize(
    ("profile", "wanted"),
    [("cpu", {"worker", "trainer"}), ("generate", LENDING), ("gpu", {"worker-gpu", "trainer-gpu"})],
)
def test_a_profile_is_a_whole_cluster(profile: str, wanted: set[str]) -> None:
    services = {name for name, service in SERVICES.items() if profile in service.get("profiles", [profile])}
    assert services == wanted | {"redis", "coordinator", "weight-relay", "gateway", "driver", "base-model"}


def test_gpus_are_reserved_by_the_gpu_profile_alone() -> None:
    assert {name for name, service in SERVICES.items() if "deploy" in service} == {"worker-gpu", "trainer-gpu"}
    assert {name for name, service in SERVICES.items() if service.get("shm_size")} == {
        "worker",
        "worker-generate",
        "worker-gpu",
    }


def test_every_volume_is_named_and_every_image_is_a_target_of_the_dockerfile() -> None:
    named = {str(volume).split(":")[0] for service in SERVICES.values() for volume in service.get("volumes", [])}
    assert {volume for volume in named if not volume.startswith(".")} == set(FILE["volumes"])
    targets = set(re.findall(r"^FROM \S+ AS (\S+)$", (ROOT / "deploy/docker/Dockerfile").read_text(), re.MULTILINE))
    assert {service["build"]["target"] for service in SERVICES.values() if "build" in service} <= targets


@pytest.mark.parametrize("profile", ["cpu", "generate", "gpu"])
def test_every_image_of_a_profile_is_built_by_one_of_its_services(profile: str) -> None:
    services = [service for service in SERVICES.values() if profile in service.get("profiles", [profile])]
    built = [service["image"] for service in services if "build" in service]
    assert sorted(built) == sorted({service["image"] for service in services})


def test_every_module_that_is_started_is_there() -> None:
    for name in OURS:
        assert import_module(f"{module(name)}.__main__")


def test_the_example_begins_with_the_model_that_is_made() -> None:
    spec = check_spec(read_spec(ROOT / "examples/compose.toml"))
    assert spec.model == SERVICES["worker"]["environment"]["EBBTIDE_ROLLOUT_WORKER_MODEL"]
    assert spec.model == SERVICES["base-model"]["environment"]["EBBTIDE_MODEL"]
