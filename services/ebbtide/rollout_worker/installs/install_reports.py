"""Reports installs: to the coordinator, in the log, and as metrics."""

from collections.abc import Callable

from ebbtide import telemetry
from ebbtide.errors import EbbtideError, Unavailable
from ebbtide.rollout_worker import metrics
from ebbtide.rollout_worker.installs.weight_store import Installation, OtherArchitecture
from ebbtide.types.fleet import EngineInfo
from ebbtide.v1 import fleet_pb2, types_pb2
from ebbtide.wire.record_conversion import to_proto

log = telemetry.get_logger(__name__)


class InstallReports:
    """Turns outcomes into messages, log lines and metrics."""

    def __init__(self, send: Callable[[fleet_pb2.WorkerMessage], None]) -> None:
        self._send = send

    def installed(self, wanted: Installation, pull_s: float, pause_s: float) -> None:
        """The engine serves a version; generation was held for `pause_s`."""
        log.info("installed", **wanted.names, pull_s=round(pull_s, 4), pause_s=round(pause_s, 4))
        done = fleet_pb2.Installed(version=_version(wanted), run_id=wanted.run_id, pull_s=pull_s, pause_s=pause_s)
        self._send(fleet_pb2.WorkerMessage(installed=done))

    def measured(self, pull_s: float, pause_s: float) -> None:
        """Count an install that did work."""
        metrics.INSTALLS.labels("installed").inc()
        metrics.PULL_SECONDS.observe(pull_s)
        metrics.PAUSE_SECONDS.observe(pause_s)
        metrics.PHASE_SECONDS.labels("pause").inc(pause_s)

    def refused(self, wanted: Installation, error: EbbtideError) -> None:
        """A version could not be installed."""
        metrics.INSTALLS.labels("refused").inc()
        log.warning("version refused", **wanted.names, reason=str(error))
        failed = fleet_pb2.InstallFailed(
            version=_version(wanted),
            run_id=wanted.run_id,
            message=str(error),
            architecture=error.architecture if isinstance(error, OtherArchitecture) else "",
            unreachable=isinstance(error, Unavailable),
        )
        self._send(fleet_pb2.WorkerMessage(install_failed=failed))

    def engine_changed(self, wanted: Installation, info: EngineInfo, seconds: float, *, failed: bool) -> None:
        """The engine was restarted and is now `info`; `failed`: not for the version wanted."""
        engine = to_proto(info, fleet_pb2.EngineInfo)
        changed = fleet_pb2.EngineChanged(engine=engine, run_id=wanted.run_id, seconds=seconds)
        self._send(fleet_pb2.WorkerMessage(engine_changed=changed))
        if not failed:
            metrics.ENGINE_STARTS.inc()
            log.info("engine changed", **wanted.names, model=info.model, seconds=round(seconds, 3))


def _version(wanted: Installation) -> types_pb2.PolicyVersion:
    return to_proto(wanted.version, types_pb2.PolicyVersion)
