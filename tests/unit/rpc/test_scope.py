"""The runs that a request is about are found wherever the contracts have them."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
from google.protobuf.message import Message

from ebbtide.auth.admission import OfOneRun, can_name_run, check_run, runs_named
from ebbtide.errors import PermissionDenied
from ebbtide.v1 import fleet_pb2, rollouts_pb2, runs_pb2, weights_pb2
from ebbtide.v1.fleet_pb2 import Attach, AttemptRef, HeldAttempt, Opened
from ebbtide.v1.weights_pb2 import ManifestPart, PatchHead, PatchPart

A, B = AttemptRef(run_id="a"), AttemptRef(run_id="b")
LEASE = runs_pb2.LeaseRef(run_id="a", role="trainer")


@pytest.mark.parametrize(
    ("message", "runs"),
    [
        (runs_pb2.GetRunRequest(run_id="a"), ["a"]),
        (LEASE, ["a"]),
        (rollouts_pb2.SubmitRequest(lease=LEASE), ["a"]),
        (rollouts_pb2.SubmitRequest(), []),
        (runs_pb2.ClaimRunRequest(role="trainer"), []),
        (ManifestPart(run_id="a", patch=PatchPart(head=PatchHead(run_id="b"))), ["a", "b"]),
        (fleet_pb2.AppendRequest(opened=[Opened(attempt=A), Opened(attempt=B)]), ["a", "b"]),
        (fleet_pb2.WorkerMessage(attach=Attach(held=[HeldAttempt(attempt=B)])), ["b"]),
        (
            runs_pb2.ListRunsResponse(runs=[runs_pb2.Run(run_id="a", counters={"x": 1}, holders={"x": "y"})]),
            ["a"],
        ),
    ],
)
def test_run_ids_are_found_at_any_depth(message: Any, runs: list[str]) -> None:
    assert list(runs_named(message)) == runs


def test_calls_that_have_no_place_for_a_run_are_known() -> None:
    assert can_name_run("/ebbtide.v1.Runs/RenewLease")
    assert can_name_run("/ebbtide.v1.Weights/PutTiles")
    for method in ("Runs/ListRuns", "Fleet/ListWorkers", "Fleet/DrainWorker", "Runs/NoSuchCall"):
        assert not can_name_run(f"/ebbtide.v1.{method}")


def test_one_foreign_run_among_several_is_enough_to_be_refused() -> None:
    check_run(ManifestPart(run_id="a", patch=PatchPart(head=PatchHead(run_id="a"))), "a")
    with pytest.raises(PermissionDenied, match="another run"):
        check_run(ManifestPart(run_id="a", patch=PatchPart(head=PatchHead(run_id="b"))), "a")
    with pytest.raises(PermissionDenied, match="names none"):
        check_run(runs_pb2.ClaimRunRequest(role="trainer"), "a")


async def read(requests: AsyncIterator[Message], passed: list[Message]) -> None:
    async for message in requests:
        passed.append(message)  # noqa: PERF401 - those before a refusal count


async def test_a_stream_names_its_run_first_and_no_other_later() -> None:
    async def tiles(*runs: str) -> AsyncIterator[weights_pb2.Tile]:
        for run_id in runs:
            yield weights_pb2.Tile(run_id=run_id)

    assert len([tile async for tile in OfOneRun(tiles("a", "", "a"), "a")]) == 3
    for runs, seen, why in ((("", "a"), 0, "names none"), (("a", "", "b"), 2, "another run")):
        passed: list[Message] = []
        with pytest.raises(PermissionDenied, match=why):
            await read(OfOneRun(tiles(*runs), "a"), passed)
        assert len(passed) == seen
