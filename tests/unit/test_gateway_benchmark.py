"""What the benchmark of the gateway makes of answers, ledgers and times."""

import argparse
import asyncio
import json
import subprocess
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest

from benchmarks.gateway import __main__ as benchmark
from benchmarks.gateway.answer_check import doubled_tokens, rollout_of, wrong_answers
from benchmarks.gateway.conversation_crowd import AnsweredTurn, ConversationCrowd
from benchmarks.gateway.disturbed_fleet import SCRIPT
from benchmarks.gateway.gateway_figures import PROMISED_BOUNDS, figure_rows, promised_figures
from benchmarks.gateway.gateway_plan import GatewayPlan
from benchmarks.gateway.stream_timing import StreamTiming, block_figures
from benchmarks.gateway.trace_check import wrong_traces
from benchmarks.gateway.vllm_part import latency_figures
from ebbtide.ledger import AttemptRecord
from tests.fakes.scripted_engine import follow

PROMPT = [5, 6, 7]
MADE = follow(SCRIPT, PROMPT, 8)
TURN = AnsweredTurn(
    session_id="c1",
    request_id="c1-0",
    prompt_ids=PROMPT,
    ids=[token for token, _ in MADE],
    logprobs=[logprob for _, logprob in MADE],
    versions={1},
)


def attempt(start: int, generated: int) -> AttemptRecord:
    return AttemptRecord(
        run_id="talk-1", rollout_id=rollout_of(TURN), attempt_id=f"a{start}", start=start, generated=generated
    )


def test_an_answer_that_attempts_made_one_behind_the_other_is_exact() -> None:
    ledger = [attempt(3, 5), attempt(0, 4)]
    assert wrong_answers([TURN], ledger, tokens=8, version=1) == []
    assert doubled_tokens([TURN], ledger) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"ids": [*TURN.ids[:-1], TURN.ids[-1] ^ 1]},
        {"ids": TURN.ids[:-1]},
        {"logprobs": [*TURN.logprobs[:-1], -9.0]},
        {"prompt_ids": [5, 6, 8]},
        {"versions": {1, 2}},
        {"versions": set()},
    ],
)
def test_an_answer_that_differs_in_anything_is_wrong(change: dict[str, Any]) -> None:
    changed = msgspec.structs.replace(TURN, **change)
    assert wrong_answers([changed], [attempt(0, 8)], tokens=8, version=1) == ["c1-0"]


@pytest.mark.parametrize("ledger", [[], [attempt(0, 7)], [attempt(0, 3), attempt(4, 4)], [attempt(2, 6)]])
def test_tokens_that_no_ledger_has_are_wrong(ledger: list[AttemptRecord]) -> None:
    assert wrong_answers([TURN], ledger, tokens=8, version=1) == ["c1-0"]


def told_session(turns: list[AnsweredTurn]) -> Any:
    """The trace of a session whose turns lie on one path."""
    last, path = turns[-1], list[int]()
    tokens: list[tuple[int, float, int]] = []
    for turn in turns:
        tokens += [(token, 0.0, 0) for token in turn.prompt_ids[len(path) :]]
        tokens += [(token, logprob, 1) for token, logprob in zip(turn.ids, turn.logprobs, strict=True)]
        path = turn.prompt_ids + turn.ids
    first = len(turns[0].prompt_ids)
    ids, logprobs, masks = (list(column) for column in zip(*tokens[first:], strict=True))
    told = [
        {
            "prompt_token_ids": turn.prompt_ids,
            "completions": [
                {
                    "id": rollout_of(turn),
                    "token_ids": turn.ids,
                    "logprobs": turn.logprobs,
                    "weight_versions": [{"version": "1", "start": 0, "end": len(turn.ids)}],
                }
            ],
        }
        for turn in turns
    ]
    branch = {"prompt_token_ids": last.prompt_ids[:first], "token_ids": ids, "logprobs": logprobs}
    masks_and_versions = {"loss_mask": masks, "sampled_mask": list(masks), "weight_versions": list(masks)}
    return {"turns": told, "branches": [branch | masks_and_versions]}


def two_turns() -> list[AnsweredTurn]:
    prompt = [*PROMPT, *TURN.ids, 9, 10]
    made = follow(SCRIPT, prompt, 4)
    ids, logprobs = [token for token, _ in made], [logprob for _, logprob in made]
    return [TURN, msgspec.structs.replace(TURN, request_id="c1-1", prompt_ids=prompt, ids=ids, logprobs=logprobs)]


def test_a_true_trace_is_right() -> None:
    turns = two_turns()
    assert wrong_traces({"c1": told_session(turns)}, turns, version=1) == []


def test_a_session_without_a_trace_counts() -> None:
    assert wrong_traces({}, two_turns(), version=1) == ["c1-0", "c1-1", "c1"]


@pytest.mark.parametrize(
    ("name", "place", "value"),
    [
        ("token_ids", 0, 99),
        ("token_ids", -1, 99),
        ("logprobs", -1, -7.0),
        ("loss_mask", 0, 0),
        ("loss_mask", 8, 1),
        ("sampled_mask", 8, 1),
        ("weight_versions", 0, 2),
        ("weight_versions", 8, 1),
        ("prompt_token_ids", 0, 99),
    ],
)
def test_a_branch_that_differs_in_anything_is_wrong(name: str, place: int, value: float) -> None:
    turns = two_turns()
    trace = told_session(turns)
    trace["branches"][0][name] = list(trace["branches"][0][name])
    trace["branches"][0][name][place] = value
    assert wrong_traces({"c1": trace}, turns, version=1) == ["c1"]


def test_a_turn_that_is_told_otherwise_is_wrong() -> None:
    turns = two_turns()
    trace = told_session(turns)
    trace["turns"][1]["prompt_token_ids"] = [1, *turns[1].prompt_ids[1:]]
    assert wrong_traces({"c1": trace}, turns, version=1) == ["c1-1"]


def turn_options(words: list[str]) -> argparse.Namespace:
    """How the benchmark of turn routing reads its command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out")
    return parser.parse_args(words)


class FailingClient:
    """An `openai` client of a gateway that never answers."""

    def __init__(self) -> None:
        self.chat = self.completions = self
        self.asked: list[str] = []

    async def create(self, **body: Any) -> Any:
        self.asked.append(body["extra_headers"]["X-Request-ID"])
        await asyncio.sleep(0)
        raise ConnectionResetError("gone")


class TwoGateways:
    """A fleet whose first gateway was killed."""

    def __init__(self) -> None:
        self.gateways: dict[str, Any] = {"g1": FailingClient(), "g2": FailingClient()}
        self.gone, self.tells_traces = {"g1"}, False

    def other(self, gateway: str) -> str:
        return "g2" if gateway == "g1" else "g1"


async def test_only_errors_of_a_killed_gateway_are_forgiven() -> None:
    fleet: Any = TwoGateways()
    plan = GatewayPlan(conversations=1, turns=2, tokens=4)
    crowd = ConversationCrowd(fleet, plan, Random(1))
    crowd.begin()
    await asyncio.sleep(0)
    await crowd.finish()
    assert fleet.gateways["g1"].asked == ["c1-0"]
    assert fleet.gateways["g2"].asked[0] == "c1-0"
    assert crowd.came_back == 1
    assert crowd.errors[0] == "g2: ConnectionResetError: gone"


def test_a_blocks_figures_are_in_milliseconds() -> None:
    timings = [StreamTiming(0.01 * (number + 1), 0.002, 0.005) for number in range(10)]
    found = block_figures(timings)
    assert found["ttft_p50_ms"] == pytest.approx(50)
    assert found["ttft_p99_ms"] == pytest.approx(100)
    assert found["tpot_ms"] == pytest.approx(2)
    assert found["gap_p99_ms"] == pytest.approx(5)


def test_latencies_are_medians_over_pairs_of_blocks() -> None:
    def block(first: float, each: float) -> dict[str, float]:
        return {"ttft_p50_ms": first, "ttft_p99_ms": 2 * first, "tpot_ms": each, "gap_p99_ms": 9.0}

    pairs = [(block(30, 4.2), block(10, 4)), (block(31, 4.4), block(10, 4)), (block(500, 80), block(10, 4))]
    found = latency_figures(pairs)
    assert (found["ttft_overhead_p50_ms"], found["ttft_overhead_p99_ms"]) == (21, 42)
    assert found["tpot_over_vllm"] == pytest.approx(1.1)


def test_a_broken_promise_and_a_missing_figure_are_shown() -> None:
    figures = promised_figures({"client_errors_under_kills": 1, "prefix_hits_over_sticky": 0.9, "tpot_over_vllm": 1.0})
    rows = figure_rows(figures, {"trace_mismatches": "not there"})
    assert set(figures) == set(PROMISED_BOUNDS)
    assert [row.split()[0] for row in rows if "NOT KEPT" in row] == [
        "client_errors_under_kills",
        "prefix_hits_over_sticky",
    ]
    assert any(row.endswith("not there") for row in rows)


def test_a_part_that_fails_leaves_the_others_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def kills(*_: Any) -> dict[str, Any]:
        return {"client_errors_under_kills": 0}

    async def vllm(*_: Any) -> dict[str, Any]:
        raise RuntimeError("no engine here")

    monkeypatch.setattr(benchmark, "measure_kills", kills)
    monkeypatch.setattr(benchmark, "measure_beside_vllm", vllm)
    out = tmp_path / "gateway.json"
    assert benchmark.main(["--quick", "--parts", "kills", "vllm", "--out", str(out)]) == 0
    told = json.loads(out.read_text())
    assert told["figures"]["client_errors_under_kills"] == 0
    assert told["figures"]["tpot_over_vllm"] is None
    assert "no engine here" in told["missing"]["tpot_over_vllm"]


def test_turns_are_simulated_by_their_own_benchmark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("prefix_hits_over_sticky", "throughput_over_least_loaded", "throughput_over_rose_rule")

    def run(command: list[str], **_: Any) -> None:
        given = vars(turn_options(command[3:]))
        assert given["quick"]
        Path(given["out"]).write_text(json.dumps({"figures": dict.fromkeys(names, 1.25)}))

    monkeypatch.setattr(benchmark, "conditions", dict)
    monkeypatch.setattr(subprocess, "run", run)
    out = tmp_path / "gateway.json"
    assert benchmark.main(["--quick", "--parts", "turns", "--out", str(out)]) == 0
    figures = json.loads(out.read_text())["figures"]
    assert [figures[name] for name in names] == [1.25] * 3
    assert figures["client_errors_under_kills"] is None
