"""Lists what comes with the simulator: profiles of engines and trainers, and example scenarios."""

import tomllib
from collections.abc import Iterator
from pathlib import Path

from rich.table import Table
from rich.text import Text

from ebbtide.cli.views.tables import cell, data_table
from ebbtide.simulator.engines.engine_profile import EngineProfile
from ebbtide.simulator.engines.profile_files import profile_names, read_profile
from ebbtide.simulator.engines.trainer_profile import TrainerProfile
from ebbtide.simulator.scenario.example_files import example_files


def profile_table() -> Table:
    """Tabulates the profiles: what scenarios call them, and where their numbers come from."""
    table = data_table(("profile", "of", "device", "GPUs", "source"), left={"profile", "of", "device", "source"})
    for engine in (read_profile(EngineProfile, name) for name in profile_names(EngineProfile)):
        table.add_row(*_cells("engine", engine))
    for trainer in (read_profile(TrainerProfile, name) for name in profile_names(TrainerProfile)):
        table.add_row(*_cells("trainer", trainer))
    return table


def _cells(called: str, profile: EngineProfile | TrainerProfile) -> Iterator[Text]:
    told = (profile.name, f"{called} of {profile.model}", profile.device, str(profile.gpus), profile.source)
    return map(cell, told)


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
