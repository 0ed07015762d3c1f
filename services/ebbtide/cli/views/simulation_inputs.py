"""Lists what comes with the simulator: models and GPUs that profiles are derived from, and example scenarios."""

import tomllib
from collections.abc import Iterator
from pathlib import Path

from rich.table import Table

from ebbtide.cli.views.tables import cell, data_table
from ebbtide.simulator.engines.known_hardware import GPUS, MODELS
from ebbtide.simulator.engines.roofline import DeviceSheet, ModelShape, kv_room
from ebbtide.simulator.scenario.example_files import example_files


def model_table() -> Table:
    """Tabulates the models, and the fewest GPUs of a host on which an engine has room for them."""
    table = data_table(("model", "GB", *(f"fewest {gpu.name}" for gpu in GPUS)), left={"model"})
    for model in MODELS:
        fewest = (_fewest_gpus(model, gpu) for gpu in GPUS)
        table.add_row(*map(cell, (model.name, f"{model.bytes / 1e9:.0f}", *fewest)))
    return table


def _fewest_gpus(model: ModelShape, gpu: DeviceSheet) -> str:
    return next((str(gpus) for gpus in (1, 2, 4, 8) if kv_room(model, gpu, gpus) > 0), "-")


def example_table() -> Table:
    """Tabulates the example scenarios: their files, and what each asks."""
    table = data_table(("example", "question"), left={"example", "question"})
    for path in example_files():
        table.add_row(cell(str(path)), cell(_question(path)))
    return table


def _question(path: Path) -> str:
    """The comment with which an example begins, up to its question mark; else its name."""
    asked, mark, _ = " ".join(_opening_comment(path.read_text())).partition("?")
    return f"{asked}{mark}" or str(tomllib.loads(path.read_text()).get("name", ""))


def _opening_comment(text: str) -> Iterator[str]:
    for line in text.splitlines():
        if not line.startswith("# "):
            return
        yield line.removeprefix("# ").strip()
