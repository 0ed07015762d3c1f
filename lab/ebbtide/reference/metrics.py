"""The page about metrics and alerts, from their declarations in the code and from deploy/prometheus/alerts.yml."""

import re
from collections.abc import Iterator
from typing import Final

import yaml

from ebbtide.reference.field_tables import cell
from ebbtide.reference.registered_metrics import ROOT, SERVERS, registered

_HEAD: Final = """# Metrics and alerts

Every program serves Prometheus metrics with `--metrics-port PORT`, at `http://HOST:PORT/metrics`. HOST is
`--metrics-host`, localhost by default. There is neither TLS nor a token: bind the port to an address that only
your Prometheus reaches.

Rollouts and workers are never labels, because their number grows. The label `run` covers only the oldest 200
live runs. `ebbtide run show RUN` and `ebbtide run timeline RUN` show what became of a run's tokens. A histogram
has the series `_bucket`, `_sum` and `_count`. Prometheus's client adds `process_...` and `python_...`. The
coordinator's gauges are set once a second, and those of the store and of what waits in it every 15 s.

`deploy/prometheus` has a configuration and the alerts below. `deploy/grafana/ebbtide.json` is a dashboard:
import it and choose the data source. Tests compare names, labels and grammar of alerts and dashboard with the
code; no real Prometheus and no Grafana has loaded them.
"""
_PROGRAMS: Final = {
    SERVERS: "Every program; `ebbtide_rpc_...`: every gRPC server",
    "coordinator": "Coordinator",
    "rollout_worker": "Rollout-worker",
    "weight_relay": "Weight-relay",
    "serving_guard": "Serving-guard",
    "gateway": "Gateway",
    "trainer": "Built-in trainer",
    "driver": "Episode driver",
}
_ALERTS: Final = """## Alerts

A `page` needs somebody now, a `ticket` somebody in working hours. The limits are starting values: set them by
what your fleet does on a good day. VALUE stands for the value of the expression, and other capitals for labels.
"""
_TEMPLATE: Final = re.compile(r"\{\{ \$(?:labels\.)?(\w+)[^}]*\}\}")


def page() -> Iterator[str]:
    """Lines of docs/reference/metrics.md. Raises `ValueError` for a metric of a program that has no section."""
    yield from (*_HEAD.splitlines(), "")
    metrics = sorted(registered().values())  # by name, whichever modules they are in
    if unknown := {metric.program for metric in metrics} - _PROGRAMS.keys():
        raise ValueError(f"name the sections of {sorted(unknown)}")
    for program, title in _PROGRAMS.items():
        yield from (f"## {title}", "", "| metric | kind | meaning |", "|---|---|---|")
        for metric in metrics:
            if metric.program == program:
                labels = f"{{{','.join(metric.labels)}}}" if metric.labels else ""
                yield f"| `{metric.name}{labels}` | {metric.kind} | {cell(metric.help)} |"
        yield ""
    yield from (*_ALERTS.splitlines(), "")
    groups = yaml.safe_load((ROOT / "deploy" / "prometheus" / "alerts.yml").read_text())["groups"]
    yield from ("| alert | urgency | when | what to do |", "|---|---|---|---|")
    for rule in (rule for group in groups for rule in group["rules"]):
        notes = rule["annotations"]
        lasting = "" if rule["for"] == "0m" else f", for {rule['for']}"
        expression = " ".join(rule["expr"].split()).replace("|", "\\|")
        when = f"{cell(_TEMPLATE.sub(_placeholder, notes['summary'])).rstrip('.')}: `{expression}`{lasting}"
        yield f"| `{rule['alert']}` | {rule['labels']['severity']} | {when} | {cell(notes['description'])} |"
    yield ""


def _placeholder(template: re.Match[str]) -> str:
    return template[1].upper()
