"""What tables and listings have in common: records as JSON."""

import datetime as dt
import json

from ebbtide.cli.views.tables import to_json
from ebbtide.types.fleet import Worker, WorkerKind, WorkerState
from ebbtide.types.run import EnvironmentSpec, Run, RunOutlook, RunSpec, RunStatus


def test_records_as_json_have_all_fields_and_names_for_enums() -> None:
    spec = RunSpec(name="n", model="m", environment=EnvironmentSpec(name="e", params={"sizes": [1, 2]}))
    run = Run(run_id="r", spec=spec, status=RunStatus.RUNNING, outlook=RunOutlook(half_s=float("inf")))
    worker = Worker(worker_id="w", kind=WorkerKind.SPOT, state=WorkerState.QUARANTINED, slots=4)
    told_run, told_worker = json.loads(to_json([run, worker]))
    assert set(told_run) == set(Run.__struct_fields__)
    assert (told_run["status"], told_run["spec"]["environment"]["params"]) == ("running", {"sizes": [1, 2]})
    assert told_run["outlook"]["half_s"] is None  # JSON has no infinity
    assert (told_worker["kind"], told_worker["state"]) == ("spot", "quarantined")


def test_bytes_are_hexadecimal_and_times_have_their_zone() -> None:
    assert json.loads(to_json({"digest": b"\x01\xff"})) == {"digest": "01ff"}
    assert json.loads(to_json({"at": dt.datetime(2026, 1, 2, 3, 4, tzinfo=dt.UTC)})) == {
        "at": "2026-01-02T03:04:00+00:00"
    }
