"""The table of roles names every RPC of the contracts, and no other."""

from pathlib import Path

from ebbtide.auth.roles import TABLE, Role, may_claim, permitted
from ebbtide.v1 import fleet_pb2, grants_pb2, loans_pb2, rollouts_pb2, runs_pb2, sessions_pb2, types_pb2, weights_pb2

FILES = (fleet_pb2, grants_pb2, loans_pb2, rollouts_pb2, runs_pb2, sessions_pb2, types_pb2, weights_pb2)


def test_the_table_names_every_rpc_of_the_contracts_and_no_other() -> None:
    services = [service for file in FILES for service in file.DESCRIPTOR.services_by_name.values()]
    assert set(TABLE) == {f"/{one.full_name}/{method.name}" for one in services for method in one.methods}
    assert all(TABLE.values())


def test_every_file_of_the_contracts_was_looked_at() -> None:
    found = {path.name for path in Path(fleet_pb2.__file__).parent.glob("*_pb2.py")}
    assert found == {f"{file.__name__.rpartition('.')[2]}.py" for file in FILES}


def test_neither_a_worker_nor_a_gateway_can_call_what_only_a_trainer_may() -> None:
    trainers = [method for method, roles in TABLE.items() if roles == {Role.TRAINER}]
    assert {"/ebbtide.v1.Runs/AnnounceVersion", "/ebbtide.v1.Weights/CommitPublish"} <= set(trainers)
    for other in (Role.WORKER, Role.GATEWAY):
        assert not any(permitted(method, [other]) for method in trainers)
    assert not permitted("/ebbtide.v1.Runs/ClaimRun", [Role.WORKER])


def test_a_user_may_do_nothing_that_an_operator_may_not() -> None:
    assert all(Role.OPERATOR in roles for roles in TABLE.values() if Role.USER in roles)


def test_a_gateway_claims_no_trainers_lease_and_a_trainer_no_gateways() -> None:
    assert may_claim("gateway", [Role.GATEWAY])
    assert may_claim("trainer", [Role.TRAINER])
    assert may_claim("driver", [Role.TRAINER])
    assert not may_claim("trainer", [Role.GATEWAY])
    assert not may_claim("driver", [Role.GATEWAY])
    assert not may_claim("gateway", [Role.TRAINER, Role.WORKER])


def test_health_is_for_every_role_and_what_nobody_has_heard_of_for_none() -> None:
    for role in Role:
        assert permitted("/grpc.health.v1.Health/Check", [role])
        assert permitted("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", [role])
        assert not permitted("/ebbtide.v1.Runs/ForgetEverything", [role])
        assert not permitted("/grpc.health.v1.HealthOfOthers/Check", [role])
