"""What the programs of a local cluster are told, as they read it."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from ebbtide import settings
from ebbtide.cli import up
from ebbtide.driver.settings import DriverSettings
from ebbtide.environments import BUILT_IN
from ebbtide.errors import InvalidRequest
from ebbtide.gateway.settings import GatewaySettings
from ebbtide.local_cluster.host_resources import MirrorFolder
from ebbtide.local_cluster.launcher import Launcher, Program
from ebbtide.local_cluster.local_cluster import ClusterShape, LocalCluster, usable_devices
from ebbtide.rollout_worker.settings import VllmSettings, WorkerSettings
from ebbtide.trainer.settings import TrainerSettings
from ebbtide.types.fleet import WorkerKind
from ebbtide.weight_relay.settings import RelaySettings
from tests.fakes.nvml import gpus, imitate

ONE, OTHER = "127.0.0.1:1", "127.0.0.1:2"


@pytest.fixture
def cluster(tmp_path: Path) -> LocalCluster:
    """Nothing of it runs."""
    mirrors = MirrorFolder(tmp_path, tmp_path / "no-shared-memory")
    launched = cast("Launcher", SimpleNamespace(keeps={}.__getitem__))  # it knows no program
    made = LocalCluster(tmp_path, tmp_path / "a" / "b" / "redis.sock", launched, mirrors)
    relay, gateway = "127.0.0.1:3", "127.0.0.1:4"
    made.shape = ClusterShape(model=tmp_path, coordinator=ONE, standby=OTHER, relay=relay, gateway=gateway)
    return made


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (LocalCluster._relay, RelaySettings),
        (LocalCluster._trainer, TrainerSettings),
        (LocalCluster._driver, DriverSettings),
        (LocalCluster.next_worker, WorkerSettings),
        (LocalCluster._gateway, GatewaySettings),
    ],
)
def test_every_program_knows_of_the_coordinator_that_stands_by(cluster: LocalCluster, make: Any, kind: Any) -> None:
    program = make(cluster)
    found = settings.read(kind, prog=program.name, argv=program.command[3:], environ=program.environment)
    assert found.coordinator == f"{ONE},{OTHER}"


def test_the_gateway_listens_where_it_is_wanted_and_ends_before_the_workers(cluster: LocalCluster) -> None:
    program = cluster._gateway()
    found = settings.read(GatewaySettings, prog="gateway", argv=program.command[3:], environ=program.environment)
    assert found.listen == "127.0.0.1:4"
    assert found.drain_s < 5
    assert program.stage < cluster.next_worker().stage


def test_the_users_own_environments_are_allowed_and_run_as_the_user(cluster: LocalCluster) -> None:
    def driver() -> DriverSettings:
        program = cluster._driver()
        return settings.read(DriverSettings, prog="driver", argv=program.command[3:], environ=program.environment)

    assert not driver().environments.trust
    cluster.shape = msgspec.structs.replace(cluster.shape, environments=("sums:Sums",))
    assert driver().environments.trust
    assert set(driver().environments.allowed) == {"sums:Sums", *BUILT_IN}


def test_each_machine_has_a_core_and_trainer_and_its_own_engine_share_theirs(cluster: LocalCluster) -> None:
    cluster.shape = msgspec.structs.replace(cluster.shape, device_cores=(0,), machines=(1, 2))
    workers = [cluster.next_worker() for _ in range(3)]
    assert [worker.cores for worker in workers] == [(1,), (2,), (1,)]
    assert cluster.next_worker(core=2).cores == (2,)
    assert cluster.lent_worker().cores == (0,)
    trainer = cluster._trainer()
    found = settings.read(TrainerSettings, prog="trainer", argv=trainer.command[3:], environ=trainer.environment)
    assert (trainer.cores, found.threads) == ((0,), 1)


def test_the_trainer_reads_its_file_and_what_the_cluster_says_goes_first(cluster: LocalCluster, tmp_path: Path) -> None:
    (config := tmp_path / "trainer.toml").write_text("keep_checkpoints = 7\nranks = 3\nthreads = 5\n")
    cluster.shape = msgspec.structs.replace(cluster.shape, trainer_config=config)
    trainer = cluster._trainer()
    found = settings.read(TrainerSettings, prog="trainer", argv=trainer.command[3:], environ=trainer.environment)
    assert (found.keep_checkpoints, found.ranks, found.threads) == (7, 1, 5)


def test_without_machines_programs_run_on_any_core(cluster: LocalCluster) -> None:
    assert (cluster.next_worker().cores, cluster._trainer().cores, cluster._relay().cores) == ((), (), ())


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Qwen3-0.6B's size, of which the disk has nothing."""
    (folder := tmp_path / "model").mkdir()
    (folder / "config.json").write_text('{"dtype": "bfloat16"}')
    with (folder / "model.safetensors").open("wb") as file:
        file.truncate(1_200_000_000)
    return folder


def planned(cluster: LocalCluster, gpus: str = "", **shape: Any) -> dict[str, Program]:
    """The programs that use GPUs, and the relay."""
    cluster._devices = usable_devices(gpus)
    cluster._plan(msgspec.structs.replace(cluster.shape, **shape))
    programs = [cluster._trainer(), cluster._relay()]
    programs += [cluster.next_worker(borrowed=cluster.shape.borrowed) for _ in range(cluster.shape.workers)]
    programs += [cluster.lent_worker()] if cluster.shape.generate else []
    programs += [cluster._serving(cluster.shape.served)] if cluster.shape.served else []
    return {program.name: program for program in programs}


def seen(program: Program) -> list[int]:
    """Numbers of the imitated GPUs that a program sees, in its order."""
    visible = program.environment["CUDA_VISIBLE_DEVICES"].split(",")
    return [int(uuid.split("-")[1]) for uuid in visible]


def of_worker(program: Program) -> WorkerSettings:
    return settings.read(WorkerSettings, prog=program.name, argv=program.command[3:], environ=program.environment)


def test_on_eight_gpus_ranks_and_workers_see_devices_of_their_own(
    cluster: LocalCluster, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    imitate(monkeypatch, gpus(8))
    pair, single = tmp_path / "pair.toml", tmp_path / "single.toml"
    pair.write_text("[vllm]\ntensor_parallel_size = 2\n")
    single.write_text("")
    programs = planned(cluster, model=model, ranks=3, workers=3, worker_configs=(pair, single))
    assert seen(programs["trainer"]) == [0, 1, 2]
    assert [seen(programs[f"worker-{number}"]) for number in (1, 2, 3)] == [[3, 4], [5], [6, 7]]
    assert [of_worker(programs[f"worker-{number}"]).vllm.tensor_parallel_size for number in (1, 2, 3)] == [2, 1, 2]
    assert of_worker(programs["worker-2"]).vllm == VllmSettings()
    assert of_worker(programs["worker-2"]).slots == 256
    assert "CUDA_VISIBLE_DEVICES" not in programs["relay"].environment


def test_on_one_gpu_workers_get_limits_that_leave_the_trainer_room(
    cluster: LocalCluster, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    imitate(monkeypatch, gpus(1))
    programs = planned(cluster, model=model, generate=True)
    workers = [of_worker(programs[f"worker-{number}"]) for number in (1, 2, 3)]
    assert {tuple(seen(program)) for program in programs.values() if program.name != "relay"} == {(0,)}
    assert workers[2].kind is WorkerKind.BORROWED
    assert programs["worker-3"].boot_s == programs["worker-1"].boot_s + 600, "its owner may be busy for a while"
    assert all(worker.vllm.kv_cache_mib > 4096 for worker in workers)
    assert sum(worker.vllm.gpu_memory_utilization for worker in workers) < 0.6


def test_the_option_and_an_outer_environment_leave_what_programs_see(
    cluster: LocalCluster, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    imitate(monkeypatch, gpus(8), visible="6,2,5,1")
    programs = planned(cluster, "3", model=model)
    assert [seen(programs[name]) for name in ("trainer", "worker-1", "worker-2")] == [[6], [2], [5]]
    with pytest.raises(InvalidRequest, match="'7' names no GPU that is visible"):
        usable_devices("7,6")


def test_a_served_engine_and_its_borrower_share_a_device_with_memory_flags(
    cluster: LocalCluster, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    imitate(monkeypatch, gpus(2))
    programs = planned(cluster, model=model, served=model, borrowed=True, workers=1)
    serving, worker = programs["serving"], programs["worker-1"]
    assert (seen(programs["trainer"]), seen(serving), seen(worker)) == ([0], [1], [1])
    flags = dict(zip(serving.command, serving.command[1:], strict=False))
    assert float(flags["--gpu-memory-utilization"]) + of_worker(worker).vllm.gpu_memory_utilization <= 0.951
    assert int(flags["--kv-cache-memory-bytes"]) == of_worker(worker).vllm.kv_cache_mib << 20


def test_a_worker_that_replaces_another_gets_its_device(
    cluster: LocalCluster, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    imitate(monkeypatch, gpus(3))
    planned(cluster, model=model)
    kept = {"worker-1": True, "worker-2": False}
    cluster.launcher = cast("Launcher", SimpleNamespace(keeps=kept.__getitem__))
    assert seen(cluster.next_worker()) == [2]
    with pytest.raises(InvalidRequest, match="no GPU is left for a worker beside worker-1, worker-3"):
        cluster.next_worker()


def test_spot_machines_have_a_device_each_as_they_have_a_core(
    cluster: LocalCluster, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    imitate(monkeypatch, gpus(4))
    planned(cluster, model=model, workers=1, machines=(4, 5, 6), device_cores=(0,), generate=True)
    assert [(worker.cores, seen(worker)) for worker in (cluster.next_worker(core=6), cluster.next_worker(core=5))] == [
        ((6,), [3]),
        ((5,), [2]),
    ]


def test_larger_weights_get_longer_to_boot_and_only_those_who_load_them(cluster: LocalCluster, model: Path) -> None:
    programs = planned(cluster, model=model)
    assert programs["worker-1"].boot_s == pytest.approx(192)
    assert programs["trainer"].boot_s == programs["relay"].boot_s == 180.0


def test_builds_for_cpus_use_no_gpu_and_see_what_this_process_sees(
    cluster: LocalCluster, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    imitate(monkeypatch, gpus(1), visible="0")
    for name in ("torch_on_gpus", "vllm_on_gpus"):
        monkeypatch.setattr(f"ebbtide.local_cluster.local_cluster.{name}", lambda: False)
    programs = planned(cluster, model=model, ranks=2, workers=5, generate=True)
    assert {program.environment["CUDA_VISIBLE_DEVICES"] for program in programs.values()} == {"0"}
    assert of_worker(programs["worker-1"]).vllm.kv_cache_mib == 0


def test_up_asks_for_as_many_workers_as_there_are_devices_for(
    cluster: LocalCluster, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = msgspec.structs.replace(cluster.shape, model=model, ranks=2)
    assert up.workers_for(shape, "") == 2, "without GPUs"
    imitate(monkeypatch, gpus(8))
    assert up.workers_for(shape, "") == 6
    assert up.workers_for(shape, "3") == 1
    (config := tmp_path / "worker.toml").write_text("[vllm]\ntensor_parallel_size = 4\n")
    assert up.workers_for(msgspec.structs.replace(shape, worker_configs=(config,)), "") == 1
    lending = msgspec.structs.replace(shape, generate=True)
    assert (up.workers_for(lending, "2"), up.workers_for(lending, "4")) == (0, 2)
