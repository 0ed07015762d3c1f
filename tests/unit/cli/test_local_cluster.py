"""What the programs of a local cluster are told, as they read it."""

from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from ebbtide import settings
from ebbtide.driver.settings import DriverSettings
from ebbtide.environments import BUILT_IN
from ebbtide.gateway.settings import GatewaySettings
from ebbtide.local_cluster.launcher import Launcher
from ebbtide.local_cluster.local_cluster import ClusterShape, LocalCluster
from ebbtide.rollout_worker.settings import WorkerSettings
from ebbtide.trainer.settings import TrainerSettings
from ebbtide.weight_relay.settings import RelaySettings

ONE, OTHER = "127.0.0.1:1", "127.0.0.1:2"


@pytest.fixture
def cluster(tmp_path: Path) -> LocalCluster:
    """Nothing of it runs."""
    made = LocalCluster(tmp_path, tmp_path / "a" / "b" / "redis.sock", cast("Launcher", None))
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
    assert cluster.next_worker(borrowed=True, cores=cluster.shape.device_cores).cores == (0,)
    trainer = cluster._trainer()
    found = settings.read(TrainerSettings, prog="trainer", argv=trainer.command[3:], environ=trainer.environment)
    assert (trainer.cores, found.threads) == ((0,), 1)


def test_without_machines_programs_run_on_any_core(cluster: LocalCluster) -> None:
    assert (cluster.next_worker().cores, cluster._trainer().cores, cluster._relay().cores) == ((), (), ())
