"""Writes the records of a run: lines of JSON, TensorBoard's event files, and Weights & Biases.

TensorBoard's files are written here, in some 60 lines: the package would bring a web server to each trainer, and
`torch.utils.tensorboard` needs it. Format: records of TensorFlow's `tfevents` (length, masked CRC-32C, data, masked
CRC-32C), each with an `Event` message of protobuf (tensorflow/core/util/event.proto, framework/summary.proto).
"""

import math
import os
import re
import socket
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import cache, partial
from pathlib import Path
from typing import Any, Final

import msgspec

from ebbtide.telemetry import get_logger
from ebbtide.trainer.tracking import Progress, Record, Sample, Tracker
from ebbtide.types.ids import new_fence

log = get_logger(__name__)

METRICS_FILE: Final = "metrics.jsonl"
SAMPLES_FILE: Final = "samples.jsonl"


def plot_name(name: str) -> str:
    """The name of a figure where Hugging Face's trainers plot it: `reward` is `train/reward`, `eval_reward`
    `eval/reward`."""
    return f"eval/{name.removeprefix('eval_')}" if name.startswith("eval_") else f"train/{name}"


class JsonLines:
    """Writes `metrics.jsonl`, one line for each record, and `samples.jsonl`, one line for each sample."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        with ExitStack() as opened:
            self._metrics = opened.enter_context(_whole_lines(folder / METRICS_FILE).open("ab"))
            self._samples = opened.enter_context(_whole_lines(folder / SAMPLES_FILE).open("ab"))
            self._opened = opened.pop_all()

    def write(self, record: Record) -> None:
        for sample in record.samples:
            self._samples.write(msgspec.json.encode(sample) + b"\n")
        self._samples.flush()
        names = ("kind", "step", "seconds", "cursor", "preempted")
        head = {name: getattr(record, name) for name in names}
        self._metrics.write(msgspec.json.encode(head | record.figures) + b"\n")
        self._metrics.flush()

    def close(self) -> None:
        self._opened.close()


#: Bytes of the file's end that are read for its progress: far more than the last steps' lines.
_TAIL: Final = 1 << 20


def progress_of(folder: Path) -> Progress:
    """Reads how far `metrics.jsonl` in a folder goes: nowhere, if it is not there or cannot be read."""
    try:
        return _last_progress(folder / METRICS_FILE)
    except FileNotFoundError:
        return Progress()
    except (OSError, msgspec.DecodeError, KeyError, TypeError) as error:
        log.warning("all of the run is tracked again", reason=f"{folder / METRICS_FILE}: {error}")
        return Progress()


def _last_progress(path: Path) -> Progress:
    with path.open("rb") as file:
        begin = max(0, file.seek(0, os.SEEK_END) - _TAIL)
        file.seek(begin)
        lines = file.read().split(b"\n")[1 if begin else 0 : -1]  # those of which both ends are there
    whole = [msgspec.json.decode(line) for line in lines]
    return Progress(whole[-1]["cursor"], int(whole[-1].get("preempted", 0))) if whole else Progress()


def _whole_lines(path: Path) -> Path:
    """Cuts off the part of a line with which a killed process ended. A line is no longer than `_TAIL`."""
    if path.exists():
        with path.open("r+b") as file:
            begin = max(0, file.seek(0, os.SEEK_END) - _TAIL)
            file.seek(begin)
            file.truncate(begin + file.read().rfind(b"\n") + 1)
    return path


class TensorBoard:
    """Writes one event file into a folder, beside those of earlier processes, which TensorBoard reads as one run."""

    def __init__(self, folder: Path, clock: Callable[[], float]) -> None:
        """`clock`: seconds since 1970."""
        folder.mkdir(parents=True, exist_ok=True)
        self._clock = clock
        name = f"events.out.tfevents.{int(clock()):010}.{socket.gethostname()}.{os.getpid()}.{new_fence()[:8]}"
        self._file = (folder / name).open("ab")
        self._event(_bytes(3, b"brain.Event:2"))

    def write(self, record: Record) -> None:
        if record.kind == "resumed":  # the start of a session: TensorBoard forgets the steps that come again
            self._event(_int(2, record.step + 1) + _bytes(7, _int(1, 1)))
            return
        values = [_scalar(plot_name(name), value) for name, value in record.figures.items()]
        if record.samples:
            values.append(_text("train/completions", _table(record.samples)))
        self._event(_int(2, record.step) + _bytes(5, b"".join(_bytes(1, value) for value in values)))

    def close(self) -> None:
        self._file.close()

    def _event(self, fields: bytes) -> None:
        data = b"\x09" + struct.pack("<d", self._clock()) + fields
        length = struct.pack("<Q", len(data))
        self._file.write(length + _masked_crc(length) + data + _masked_crc(data))
        self._file.flush()


def _scalar(tag: str, value: float) -> bytes:
    """What float32 has no room for is infinite."""
    try:
        packed = struct.pack("<f", value)
    except OverflowError:
        packed = struct.pack("<f", math.copysign(math.inf, value))
    return _bytes(1, tag.encode()) + b"\x15" + packed


def _text(tag: str, text: str) -> bytes:
    metadata = _bytes(1, _bytes(1, b"text")) + _int(4, 2)  # of the plug-in `text`, of the class of tensors
    tensor = _int(1, 7) + _bytes(2, b"") + _bytes(8, text.encode())  # one string
    return _bytes(1, tag.encode()) + _bytes(9, metadata) + _bytes(8, tensor)


_COLUMNS: Final = Sample.__struct_fields__
#: What would end a cell of a table in Markdown, or be read as more than text.
_MARKS: Final = re.compile(r"([\\`*_{}\[\]<>#|])")


def _table(samples: Sequence[Sample]) -> str:
    rows = [[_cell(getattr(sample, name)) for name in _COLUMNS] for sample in samples]
    return "\n".join(f"| {' | '.join(row)} |" for row in (_COLUMNS, ["---"] * len(_COLUMNS), *rows))


def _cell(value: object) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return _MARKS.sub(r"\\\1", text).replace("\n", " ⏎ ")


def _int(number: int, value: int) -> bytes:
    return _varint(number << 3) + _varint(value)


def _bytes(number: int, value: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(value)) + value


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


@cache
def _crc_table() -> list[int]:
    """Of CRC-32C (Castagnoli), by its reversed polynomial."""

    def entries() -> Iterator[int]:
        for byte in range(256):
            entry = byte
            for _ in range(8):
                entry = entry >> 1 ^ (0x82F63B78 if entry & 1 else 0)
            yield entry

    return list(entries())


def crc32c(data: bytes) -> int:
    """The CRC-32C of `data` (RFC 3720, appendix B.4)."""
    table, crc = _crc_table(), 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ table[(crc ^ byte) & 0xFF]
    return crc ^ 0xFFFFFFFF


def _masked_crc(data: bytes) -> bytes:
    """TensorFlow rotates a CRC and adds a constant, so that one of data that hold CRCs is none of them."""
    crc = crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17 & 0xFFFFFFFF) + 0xA282EAD8) & 0xFFFFFFFF)


def trackers_of(
    folder: Path, run_id: str, *, wandb_project: str, spec: Mapping[str, object]
) -> dict[str, Callable[[], Tracker]]:
    """Returns how the trackers of a run are made, whose files are in `folder`, by name. Lines of JSON come last: what
    they hold need not be tracked again."""
    found: dict[str, Callable[[], Tracker]] = {"tensorboard": partial(TensorBoard, folder / "tensorboard", time.time)}
    if wandb_project:
        found["wandb"] = partial(WeightsAndBiases, folder, run_id, project=wandb_project, spec=spec)
    return found | {"jsonl": partial(JsonLines, folder)}


class WeightsAndBiases:
    """Logs to Weights & Biases: online, or into `wandb/` of the folder with WANDB_MODE=offline.

    The account comes from WANDB_API_KEY or `wandb login`. A restarted trainer continues its run.
    """

    def __init__(self, folder: Path, run_id: str, *, project: str, spec: Mapping[str, object]) -> None:
        import wandb

        folder.mkdir(parents=True, exist_ok=True)
        identity = folder / "wandb-id"
        if not identity.exists():  # the run's own: its name may come again in another cluster
            identity.write_text(f"{run_id}-{new_fence()[:8]}")
        self._tables: Any = wandb.Table
        self._run: Any = wandb.init(
            project=project,
            id=identity.read_text(),
            name=run_id,
            group=str(spec.get("name", "")),
            dir=str(folder),
            config=dict(spec),
            resume="allow",
            settings=wandb.Settings(console="off", silent=True),
        )
        self._run.define_metric("train/global_step")
        for names in ("train/*", "eval/*"):
            self._run.define_metric(names, step_metric="train/global_step")

    def write(self, record: Record) -> None:
        if record.kind == "resumed":
            return
        values: dict[str, Any] = {plot_name(name): value for name, value in record.figures.items()}
        values["train/global_step"] = record.step
        if record.samples:
            rows = [[getattr(sample, name) for name in _COLUMNS] for sample in record.samples]
            values["completions"] = self._tables(columns=list(_COLUMNS), data=rows)
        self._run.log(values)

    def close(self) -> None:
        self._run.finish()
