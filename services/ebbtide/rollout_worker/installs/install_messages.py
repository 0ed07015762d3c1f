"""Makes the messages that tell the coordinator of installs."""

from ebbtide.errors import EbbtideError, Unavailable
from ebbtide.rollout_worker.installs.engine_needs import OtherArchitecture
from ebbtide.rollout_worker.installs.weight_store import Installation
from ebbtide.types.fleet import EngineInfo
from ebbtide.v1 import fleet_pb2, types_pb2
from ebbtide.wire.record_conversion import to_proto


def installed_message(wanted: Installation, pull_s: float, pause_s: float) -> fleet_pb2.WorkerMessage:
    """The engine serves a version; generation was held for `pause_s`."""
    done = fleet_pb2.Installed(version=_version(wanted), run_id=wanted.run_id, pull_s=pull_s, pause_s=pause_s)
    return fleet_pb2.WorkerMessage(installed=done)


def failed_message(wanted: Installation, error: EbbtideError) -> fleet_pb2.WorkerMessage:
    """A version could not be installed."""
    failed = fleet_pb2.InstallFailed(
        version=_version(wanted),
        run_id=wanted.run_id,
        message=str(error),
        architecture=error.architecture if isinstance(error, OtherArchitecture) else "",
        unreachable=isinstance(error, Unavailable),
    )
    return fleet_pb2.WorkerMessage(install_failed=failed)


def engine_changed_message(run_id: str, info: EngineInfo, seconds: float) -> fleet_pb2.WorkerMessage:
    """The engine was started anew, and is this from now on."""
    told = fleet_pb2.EngineChanged(engine=to_proto(info, fleet_pb2.EngineInfo), run_id=run_id, seconds=seconds)
    return fleet_pb2.WorkerMessage(engine_changed=told)


def _version(wanted: Installation) -> types_pb2.PolicyVersion:
    return to_proto(wanted.version, types_pb2.PolicyVersion)
