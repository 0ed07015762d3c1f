"""Logs are JSON lines that bear ids; metrics have the prefix and only labels with a bound."""

import json
import subprocess
import sys
import urllib.request

import pytest
from prometheus_client import REGISTRY, CollectorRegistry, Counter

from ebbtide import telemetry
from ebbtide.errors import InvalidRequest

PREAMBLE = """
import logging
from ebbtide import telemetry
telemetry.configure('worker')
log = telemetry.get_logger('t')
"""


def logged(code: str) -> list[dict[str, object]]:
    """What a process of its own logs: pytest has handlers in this one."""
    done = subprocess.run([sys.executable, "-c", PREAMBLE + code], capture_output=True, text=True, check=True)
    return [json.loads(line) for line in done.stderr.splitlines()]


def test_a_line_bears_service_level_and_bound_ids_also_from_other_libraries() -> None:
    first, second = logged(
        "telemetry.bind(worker_id='w1')\n"
        "log.info('resumed', run_id='r', rollout_id='s1.g0', offset=8)\n"
        "log.debug('too fine')\n"
        "logging.getLogger('grpc').warning('of %s', 'others', extra={'error_id': 'abcd'})"
    )
    ours = {"service": "worker", "level": "info", "event": "resumed", "worker_id": "w1", "run_id": "r", "offset": 8}
    assert ours.items() <= first.items()
    others = {"service": "worker", "level": "warning", "event": "of others", "error_id": "abcd", "logger": "grpc"}
    assert others.items() <= second.items()


def test_a_traceback_is_logged_without_the_values_of_variables() -> None:
    (line,) = logged(
        "def use(token):\n"
        "    raise ValueError(len(token))\n"
        "try:\n"
        "    use('hunter' + str(2))\n"
        "except ValueError:\n"
        "    log.exception('failed')"
    )
    assert "ValueError: 7" in str(line["exception"])
    assert "hunter2" not in json.dumps(line)


def test_a_label_without_a_bound_is_refused() -> None:
    for label in ("run_id", "rollout_id", "worker_id"):
        with pytest.raises(ValueError, match=f"no bound is known for the labels .*{label}"):
            telemetry.counter("test_unbounded_total", "never made", ("kind", label))
    assert "ebbtide_test_unbounded" not in {metric.name for metric in REGISTRY.collect()}


def test_metrics_bear_the_prefix() -> None:
    made = telemetry.counter("test_prefix_total", "for this test", ("kind",))
    made.labels("spot").inc(2)
    assert REGISTRY.get_sample_value("ebbtide_test_prefix_total", {"kind": "spot"}) == 2


def test_metrics_are_served_on_loopback_and_a_taken_port_is_named() -> None:
    registry = CollectorRegistry()
    Counter("ebbtide_served_total", "for this test", registry=registry).inc(3)
    server = telemetry.MetricsServer(0, registry=registry)
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=10) as answer:
            assert b"ebbtide_served_total 3.0" in answer.read()
        with pytest.raises(InvalidRequest, match="metrics_port: cannot bind"):
            telemetry.MetricsServer(server.port, registry=registry)
    finally:
        server.close()


def test_metrics_are_served_at_the_address_that_they_are_bound_to_alone() -> None:
    server = telemetry.MetricsServer(0, host="127.0.0.2", registry=CollectorRegistry())
    try:
        with urllib.request.urlopen(f"http://127.0.0.2:{server.port}/metrics", timeout=10) as answer:
            assert answer.status == 200
        with pytest.raises(OSError, match="refused"):
            urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=10)
    finally:
        server.close()
