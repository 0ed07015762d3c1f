"""Reads every metric that the code registers from the source: no program is imported, and none can be missed."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).parents[3]
KINDS: Final = ("counter", "gauge", "histogram")
#: Of a metric in `common/`: whoever serves calls has it.
SERVERS: Final = "every server"


class Metric(NamedTuple):
    """`labels` in their order; `program`: the folder below services/ebbtide, or `SERVERS`."""

    name: str
    kind: str
    labels: tuple[str, ...]
    program: str
    help: str

    @property
    def series(self) -> set[str]:
        """The names that Prometheus has of it."""
        if self.kind == "histogram":
            return {f"{self.name}_{suffix}" for suffix in ("bucket", "sum", "count")}
        return {self.name}


@cache
def registered() -> dict[str, Metric]:
    """By name, in the order of the programs' folders and of the source."""
    found: dict[str, Metric] = {}
    for root in (ROOT / "common" / "ebbtide", ROOT / "services" / "ebbtide", ROOT / "lab" / "ebbtide"):
        for path in sorted(root.rglob("*.py")):
            source = path.read_text()
            if "telemetry" in source or path.name == "telemetry.py":
                program = path.relative_to(root).parts[0] if root.parent.name != "common" else SERVERS
                found |= {metric.name: metric for metric in in_source(source, program)}
    return found


def in_source(source: str, program: str) -> Iterator[Metric]:
    """The metrics that a file registers. Raises `ValueError` for one whose name or labels are not spelt out."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or (kind := _called(node)) not in KINDS:
            continue
        given = dict(zip(("name", "help", "labels"), node.args, strict=False))
        given |= {word.arg: word.value for word in node.keywords if word.arg}
        try:
            name, text = ast.literal_eval(given["name"]), ast.literal_eval(given["help"])
            labels = ast.literal_eval(given["labels"]) if "labels" in given else ()
        except (ValueError, KeyError) as error:
            raise ValueError(
                f"line {node.lineno}: spell a metric's name, help and labels out: {ast.unparse(node)}"
            ) from error
        yield Metric(f"ebbtide_{name}", kind, tuple(labels), program, text)


def _called(node: ast.Call) -> str:
    """`telemetry.gauge(...)` anywhere, and `gauge(...)` in telemetry itself."""
    match node.func:
        case ast.Attribute(value=ast.Name(id="telemetry"), attr=name) | ast.Name(id=name):
            return name
    return ""
