"""What trackers write is read by the programs that people plot with, as released: TensorBoard, and W&B offline."""

import json
import subprocess
import venv
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ebbtide.trainer.trackers import TensorBoard
from ebbtide.trainer.tracking import Record, Sample
from tests.extras.test_extras import INHERITED, ROOT, run, wheel

__all__ = ["wheel"]
pytestmark = [pytest.mark.extras, pytest.mark.timeout(900)]

SAMPLE = Sample(step=1, group="g", episode="e", prompt="a | b", completion="c", reward=0.5, tokens=3, versions="1")
FIRST = [
    Record(kind="evaluation", step=0, cursor="1", seconds=1.0, figures={"eval_accuracy": 0.25}),
    *(
        Record(kind="step", step=n, cursor=str(1 + n), seconds=2.0, figures={"reward": n / 8}, samples=(SAMPLE,))
        for n in (1, 2, 3)
    ),
]
#: Of a trainer that resumed after step 2.
SECOND = [
    Record(kind="resumed", step=2, cursor="5", seconds=3.0),
    Record(kind="step", step=3, cursor="6", seconds=4.0, figures={"reward": 0.5}),
]


def environment_with(folder: Path, *packages: str) -> str:
    venv.create(folder, with_pip=True)
    python = str(folder / "bin" / "python")
    run(python, "-m", "pip", "install", "-q", *packages)
    return python


def test_tensorboard_reads_the_event_files_and_forgets_what_was_trained_again(tmp_path: Path) -> None:
    python = environment_with(tmp_path / "env", "tensorboard==2.21.0")
    for at, records in enumerate((FIRST, SECOND)):
        tracker = TensorBoard(tmp_path / "events", lambda: 1e9 + 100 * at)  # noqa: B023 - closed in this turn
        for record in records:
            tracker.write(record)
        tracker.close()
    code = f"""
import json
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
found = EventAccumulator({str(tmp_path / "events")!r})
found.Reload()
points = {{tag: [(one.step, one.value) for one in found.Scalars(tag)] for tag in found.Tags()["scalars"]}}
tables = [one.tensor_proto.string_val[0].decode() for one in found.Tensors("train/completions")]
print(json.dumps([points, tables, found.SummaryMetadata("train/completions").plugin_data.plugin_name]))
"""
    points, tables, plugin = json.loads(run(python, "-c", code).stdout)
    assert points == {"eval/accuracy": [[0, 0.25]], "train/reward": [[1, 0.125], [2, 0.25], [3, 0.5]]}
    assert plugin == "text"
    assert tables[0].splitlines()[-1] == r"| 1 | g | e | a \| b | c | 0.5 | 3 | 1 |"


def test_weights_and_biases_keeps_figures_and_tables_of_both_processes_in_one_run(wheel: Path, tmp_path: Path) -> None:
    pin = next(line for line in (ROOT / "pyproject.toml").read_text().splitlines() if line.startswith("wandb = "))
    python = environment_with(tmp_path / "env", f"{wheel}[service]", pin.split('"')[3])
    done = subprocess.run(
        [python, str(Path(__file__).with_name("offline_wandb.py")), str(tmp_path / "run")],
        env=INHERITED | {"WANDB_MODE": "offline"},
        input=msgspec.json.encode([FIRST, SECOND]),
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    lines: list[tuple[str, dict[str, Any]]] = [
        json.loads(line) for line in done.stdout.splitlines() if line[:1] == b"["
    ]
    figures = [values for name, values in lines if name != "table"]
    assert len({name for name, _ in lines if name != "table"}) == 1
    assert [(one["train/global_step"], one.get("train/reward"), one.get("eval/accuracy")) for one in figures] == [
        (0, None, 0.25),
        (1, 0.125, None),
        (2, 0.25, None),
        (3, 0.375, None),
        (3, 0.5, None),
    ]
    tables = [values for name, values in lines if name == "table"]
    assert tables[0]["columns"] == list(Sample.__struct_fields__)
    assert tables[0]["data"] == [list(msgspec.to_builtins(SAMPLE).values())]
