"""docs/metrics.md has each metric of the code and each alert, and nothing else."""

import re
from collections.abc import Iterator
from typing import Final, NamedTuple

import yaml

from tests.unit.deploy.registered import ROOT, registered

PAGE: Final = ROOT / "docs" / "metrics.md"
_METRIC: Final = re.compile(
    r"\| `(?P<name>ebbtide_\w+)(?:\{(?P<labels>[\w,]+)\})?` \| (?P<kind>\w+) \| (?P<text>.+) \|"
)
_ALERT: Final = re.compile(r"\| `(?P<name>Ebbtide\w+)` \| (?P<severity>\w+) \| (?P<when>.+) \| (?P<remedy>.+) \|")


class Row(NamedTuple):
    kind: str
    labels: tuple[str, ...]
    section: str


def rows() -> Iterator[tuple[str, Row]]:
    section = ""
    for line in PAGE.read_text().splitlines():
        if line.startswith("## "):
            section = line.removeprefix("## ")
        elif found := _METRIC.fullmatch(line):
            labels = tuple(found["labels"].split(",")) if found["labels"] else ()
            yield found["name"], Row(found["kind"], labels, section)
        else:
            assert not line.startswith("| `ebbtide_"), f"write it as | `name{{labels}}` | kind | what it says |: {line}"


def test_each_metric_of_the_code_has_a_row_that_says_what_it_is() -> None:
    page = dict(rows())
    for metric in registered().values():
        labels = f"{{{','.join(metric.labels)}}}" if metric.labels else ""
        row = f"| `{metric.name}{labels}` | {metric.kind} | {metric.help} |"
        assert metric.name in page, (
            f"{metric.name} is not in docs/metrics.md: add a row to the section of its program:\n{row}"
        )
        found = page[metric.name]
        assert (found.kind, found.labels) == (metric.kind, metric.labels), (
            f"docs/metrics.md has another one; make it\n{row}"
        )


def test_the_page_has_no_metric_that_the_code_has_not_and_none_twice() -> None:
    names = [name for name, _ in rows()]
    assert len(set(names)) == len(names)
    gone = set(names) - registered().keys()
    assert not gone, f"no program registers {sorted(gone)}: take the rows out of docs/metrics.md"


def test_metrics_of_one_program_stand_in_one_section() -> None:
    prefixes: dict[str, set[str]] = {}
    for name, row in rows():
        prefixes.setdefault(row.section, set()).add(name.split("_")[1])
    assert all(len(found) == 1 for found in prefixes.values()), prefixes


def test_each_alert_is_on_the_page_with_its_urgency_and_its_remedy() -> None:
    groups = yaml.safe_load((ROOT / "deploy" / "prometheus" / "alerts.yml").read_text())["groups"]
    page = {found["name"]: found for line in PAGE.read_text().splitlines() if (found := _ALERT.fullmatch(line))}
    rules = {rule["alert"]: rule for group in groups for rule in group["rules"]}
    assert page.keys() == rules.keys(), "docs/metrics.md and deploy/prometheus/alerts.yml list other alerts"
    for name, rule in rules.items():
        assert page[name]["severity"] == rule["labels"]["severity"], name
        assert page[name]["remedy"] == rule["annotations"]["description"], name
        if rule["for"] != "0m":
            assert page[name]["when"].endswith(f", for {rule['for']}"), name


#: Keys of simulated scenarios that begin as metrics do.
_KEYS: Final = {"relay_gbps", "trainer_price_per_hour"}


def test_pages_that_name_metrics_name_real_ones() -> None:
    known = {name.removeprefix("ebbtide_") for name in registered()}
    for page in sorted((ROOT / "docs").rglob("*.md")):
        text = page.read_text()
        named = set(
            re.findall(r"`(?:ebbtide_)?((?:coordinator|relay|worker|guard|trainer|driver|rpc)_\w+)(?:\{\w+\})?`", text)
        )
        others = {"worker_id"} | (_KEYS if page.name == "scenarios.md" else set())
        assert not named - known - others, f"{page} names {sorted(named - known)}, which no program registers"
