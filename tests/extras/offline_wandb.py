"""Logs a run's records to Weights & Biases offline, and prints what its file holds: run where `wandb` is installed.

WANDB_MODE=offline python offline_wandb.py FOLDER < records.json
"""

import json
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from ebbtide.trainer.trackers import WeightsAndBiases
from ebbtide.trainer.tracking import Record

_BLOCK = 32768


def messages(data: bytes) -> Iterator[bytes]:
    """The messages of a `.wandb` file: LevelDB's log format, after seven bytes of its own."""
    at, parts = 7, b""
    while at + 7 <= len(data):
        if _BLOCK - at % _BLOCK < 7:
            at += _BLOCK - at % _BLOCK
            continue
        _, size, kind = struct.unpack_from("<IHB", data, at)
        parts += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in {1, 4}:  # full, or the last part
            yield parts
            parts = b""


def history(path: Path) -> Iterator[dict[str, Any]]:
    from wandb.proto import wandb_internal_pb2

    for message in messages(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(message)
        if record.HasField("history"):
            items = record.history.item
            yield {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items}


if __name__ == "__main__":
    import wandb

    folder = Path(sys.argv[1])
    for part in msgspec.json.decode(sys.stdin.buffer.read(), type=list[list[Record]]):  # one list for each process
        tracker = WeightsAndBiases(folder, "run-1", project="p", spec={"name": "words", "seed": 7})
        for record in part:
            tracker.write(record)
        tracker.close()
    wandb.teardown()  # its process has written all that it will write
    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        for line in history(path):
            print(json.dumps([path.stem, line]))  # noqa: T201 - the test reads it
    for table in sorted(folder.glob("wandb/offline-run-*/files/media/table/*.json")):
        print(json.dumps(["table", json.loads(table.read_text())]))  # noqa: T201 - the test reads it
