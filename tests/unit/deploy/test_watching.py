"""Alerts, Prometheus's configuration and the dashboard name nothing that the code does not have."""

import json
import re
from collections.abc import Iterator
from functools import cache
from typing import Any, Final, NamedTuple

import pytest
import yaml

from ebbtide.reference.registered_metrics import ROOT, in_source, registered
from tests.unit.deploy.promql import parse

PROMETHEUS: Final = ROOT / "deploy" / "prometheus"
DASHBOARD: Final = ROOT / "deploy" / "grafana" / "ebbtide.json"
#: Prometheus's own, and what it adds to every series.
OWN: Final = {"up"}
ADDED: Final = {"job", "instance"}


class Use(NamedTuple):
    """An expression, where it stands, and the labels that texts beside it show."""

    where: str
    expression: str
    shown: frozenset[str] = frozenset()


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load((PROMETHEUS / "alerts.yml").read_text())["groups"]
    assert len({group["name"] for group in groups}) == len(groups)
    return [rule for group in groups for rule in group["rules"]]


def panels() -> list[dict[str, Any]]:
    found = json.loads(DASHBOARD.read_text())["panels"]
    return [panel for panel in found if panel["type"] != "row"]


def uses() -> Iterator[Use]:
    for rule in rules():
        texts = " ".join(rule["annotations"].values())
        yield Use(rule["alert"], rule["expr"], frozenset(re.findall(r"\$labels\.(\w+)", texts)))
    for panel in panels():
        for target in panel["targets"]:
            shown = frozenset(re.findall(r"\{\{\s*(\w+)\s*\}\}", target["legendFormat"]))
            yield Use(f"{panel['title']} {target['refId']}", target["expr"], shown)


@cache
def sources() -> str:
    return "\n".join(
        path.read_text() for root in ("common", "services", "lab") for path in sorted((ROOT / root).rglob("*.py"))
    )


def complaints(use: Use) -> list[str]:
    """What an expression names that is not there."""
    series = {name: metric for metric in registered().values() for name in metric.series}
    found: list[str] = []
    known = set(ADDED)
    named = parse(use.expression)
    for name, selector in named.metrics:
        if name not in series and name not in OWN:
            found.append(f"no program registers {name}")
            continue
        own = set(series[name].labels) | ({"le"} if name.endswith("_bucket") else set()) if name in series else set()
        known |= own
        found += [f"{name} has no label {label}" for label in selector.keys() - own - ADDED]
        wanted = [value for label, text in selector.items() if label not in ADDED for value in text.split("|")]
        found += [f"no program says {value!r}, of {name}" for value in wanted if not _said(value)]
    found += [f"nothing here has the label {label}" for label in (named.labels | use.shown) - known]
    return found


def _said(value: str) -> bool:
    """Whether a label's value is a text of the code, or the name of an enum's member."""
    return re.search(rf"""["']{re.escape(value)}["']|\b{re.escape(value.upper())}\b""", sources()) is not None


@pytest.mark.parametrize("use", list(uses()), ids=lambda use: use.where)
def test_all_that_alerts_and_dashboard_name_exists(use: Use) -> None:
    assert not complaints(use), use.expression


@pytest.mark.parametrize(
    ("expression", "says"),
    [
        ("sum(ebbtide_coordinator_gone)", "no program registers ebbtide_coordinator_gone"),
        ("rate(ebbtide_coordinator_append_seconds[5m])", "no program registers"),
        ("ebbtide_coordinator_workers{status='ready'}", "has no label status"),
        ("ebbtide_coordinator_workers{state=~'ready|redy'}", "no program says 'redy'"),
        ("sum by (worker) (ebbtide_coordinator_workers)", "nothing here has the label worker"),
        ("sum(ebbtide_coordinator_runs_bucket)", "no program registers"),
        ("sum by (le) (rate(ebbtide_coordinator_append_seconds_sum[5m]))", "nothing here has the label le"),
    ],
)
def test_what_does_not_exist_is_found(expression: str, says: str) -> None:
    assert says in "; ".join(complaints(Use("planted", expression)))


def test_an_expression_is_read_by_its_grammar() -> None:
    found = parse(
        'histogram_quantile(0.9, sum by (le, kind) (rate(a_bucket{x="b_total",y=~"c|d"}[$__rate_interval]))) > 1e3\n'
        "and on (job) (b_total offset 5m) unless absent(up == bool 1) # c_total"
    )
    assert found.metrics == [("a_bucket", {"x": "b_total", "y": "c|d"}), ("b_total", {}), ("up", {})]
    assert found.labels == {"le", "kind", "job"}
    for broken in ("sum(a", "sum a)", "rat(a[5m])", "a{x='b'", "a ; b", "a}"):
        with pytest.raises(ValueError, match=r"a bracket is open|out of place|no function|no '}'|no PromQL"):
            parse(broken)


def test_each_alert_says_how_long_how_urgent_and_what_to_do() -> None:
    found = rules()
    assert len({rule["alert"] for rule in found}) == len(found)
    for rule in found:
        assert rule.keys() == {"alert", "expr", "for", "labels", "annotations"}, rule["alert"]
        assert re.fullmatch(r"Ebbtide[A-Z][A-Za-z]+", rule["alert"])
        assert re.fullmatch(r"\d+[smh]", rule["for"]), rule["alert"]
        assert rule["labels"]["severity"] in {"page", "ticket"}
        assert rule["annotations"].keys() == {"summary", "description"}


def test_prometheus_reads_the_alerts_and_scrapes_each_program() -> None:
    configuration = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())
    assert all((PROMETHEUS / name).is_file() for name in configuration["rule_files"])
    jobs = {job["job_name"] for job in configuration["scrape_configs"]}
    asked = {
        value
        for use in uses()
        for _, selector in parse(use.expression).metrics
        if "job" in selector
        for value in _alternatives(selector["job"])
    }
    assert asked <= jobs
    assert len(jobs) == len(configuration["scrape_configs"]) == 6


def _alternatives(pattern: str) -> list[str]:
    """`a-(b|c)` as `a-b` and `a-c`."""
    if found := re.fullmatch(r"(.*)\((.*)\)", pattern):
        return [found[1] + part for part in found[2].split("|")]
    return pattern.split("|")


def test_the_dashboard_is_one_that_grafana_takes() -> None:
    board = json.loads(DASHBOARD.read_text())
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    assert {variable["name"] for variable in board["templating"]["list"]} == {"datasource"}
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken, panel["title"]
        taken |= cells
    for panel in panels():
        assert panel["datasource"]["uid"] == "${datasource}"
        assert panel["targets"]


def test_panels_of_served_engines_leave_trainers_devices_out() -> None:
    """Their guards have the same metrics of what is borrowed, and no load."""
    source = (ROOT / "services" / "ebbtide" / "serving_guard" / "borrowers.py").read_text()
    shared = {name for metric in in_source(source, "serving_guard") for name in metric.series}
    shown = [target["expr"] for panel in panels() for target in panel["targets"]]
    found = [text for text in shown if shared & {name for name, _ in parse(text).metrics}]
    assert found
    assert [text for text in found if "and on (instance) ebbtide_guard_load" not in text] == []


@pytest.mark.parametrize("source", ["telemetry.counter(NAME, 'text')", "telemetry.gauge('a', 'text', labels())"])
def test_a_metric_whose_name_cannot_be_read_is_refused(source: str) -> None:
    with pytest.raises(ValueError, match="spell a metric's name, help and labels out"):
        list(in_source(source, "coordinator"))


def test_what_is_read_from_the_source_is_what_a_program_has() -> None:
    """The readers of the source agree with the client library."""
    from prometheus_client import REGISTRY

    import ebbtide.coordinator.metrics
    import ebbtide.weight_relay.metrics  # noqa: F401

    mine = {metric.name.removesuffix("_total"): metric for metric in registered().values()}
    for metric in REGISTRY.collect():
        if metric.name.startswith(("ebbtide_coordinator_", "ebbtide_relay_")):
            assert mine[metric.name].kind == metric.type
