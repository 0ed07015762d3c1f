"""Writes structured logs to stderr, and serves Prometheus metrics, on loopback unless configured otherwise."""

import logging
import sys
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Final, TypeVar

import structlog
from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram, start_http_server

from ebbtide.errors import InvalidRequest

#: All labels; each has few values. Names that grow with use (rollouts, workers) belong into logs. `run` is for
#: gauges of a bounded number of live runs, which end with their run.
LABELS: Final = frozenset(
    {"method", "code", "kind", "model", "state", "status", "outcome", "phase", "reason", "site", "run"}
)
_TIMES: Final = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
T = TypeVar("T", Counter, Gauge, Histogram)


def configure(service: str, *, level: str = "info") -> None:
    """Send all logs of this process, also the standard library's, to stderr as one JSON object per line."""
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.ExtraAdder(),
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,  # without local variables, which hold tokens and data
        lambda _logger, _method, event: {"service": service, **event},
    ]
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=shared,
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, structlog.processors.JSONRenderer()],
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    structlog.configure(
        processors=[structlog.stdlib.filter_by_level, *shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )


def get_logger(name: str) -> structlog.stdlib.BoundLogger:
    """A logger that takes values by keyword: `log.info("resumed", run_id=..., rollout_id=..., offset=...)`."""
    logger: structlog.stdlib.BoundLogger = structlog.stdlib.get_logger(name)
    return logger


def bind(**values: Any) -> None:
    """Add `run_id`, `rollout_id`, `worker_id` or others to every further log line of this asyncio task."""
    structlog.contextvars.bind_contextvars(**values)


def counter(name: str, help_text: str, labels: Sequence[str] = ()) -> Counter:
    return _metric(Counter, name, help_text, labels)


def gauge(name: str, help_text: str, labels: Sequence[str] = ()) -> Gauge:
    return _metric(Gauge, name, help_text, labels)


def histogram(name: str, help_text: str, labels: Sequence[str] = (), buckets: Sequence[float] = _TIMES) -> Histogram:
    return _metric(Histogram, name, help_text, labels, buckets=tuple(buckets))


def _metric(kind: Callable[..., T], name: str, help_text: str, labels: Sequence[str], **options: Any) -> T:
    """Register `ebbtide_<name>`. Raises `ValueError` for a label that is not in `LABELS`."""
    if unbounded := set(labels) - LABELS:
        raise ValueError(f"ebbtide_{name}: no bound is known for the labels {sorted(unbounded)}; log them instead")
    return kind(f"ebbtide_{name}", help_text, tuple(labels), **options)


@cache
def rpc_observer() -> Callable[[str, str, float], None]:
    """Metrics of a server's calls, for `ebbtide.rpc.server.Server(observe=...)`; one for the whole process."""
    calls = counter("rpc_calls_total", "RPCs ended", ("method", "code"))
    seconds = histogram("rpc_seconds", "Duration of RPCs", ("method",))

    def observe(method: str, code: str, duration_s: float) -> None:
        calls.labels(method, code).inc()
        seconds.labels(method).observe(duration_s)

    return observe


class MetricsServer:
    """Serves this process's metrics at http://host:port/metrics from a thread of its own. Port 0: any free one.

    Raises `InvalidRequest` naming `metrics_port` if the port is taken.
    """

    def __init__(self, port: int, *, host: str = "127.0.0.1", registry: CollectorRegistry = REGISTRY) -> None:
        try:
            self._server, self._thread = start_http_server(port, host, registry=registry)
        except OSError as error:
            raise InvalidRequest(f"cannot bind {host}:{port} ({error.strerror})", field="metrics_port") from None
        self.port = self._server.server_port

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
