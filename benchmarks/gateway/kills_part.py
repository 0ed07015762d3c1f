"""Part `kills`: conversations go on while workers, the coordinator, Redis and a gateway are killed."""

import tempfile
import time
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.gateway.answer_check import doubled_tokens, wrong_answers
from benchmarks.gateway.conversation_crowd import ConversationCrowd
from benchmarks.gateway.disturbed_fleet import RUN_ID, DisturbedFleet, Notify
from benchmarks.gateway.gateway_plan import GatewayPlan
from benchmarks.gateway.trace_check import wrong_traces
from tests.chaos.cluster import Cluster


async def measure_kills(plan: GatewayPlan, seed: int, notify: Notify) -> dict[str, Any]:
    """The clients' errors and wrong answers, and how much was disturbed. Takes as long as the replacements boot."""
    with tempfile.TemporaryDirectory(prefix="ebb-gateway-") as directory:
        cluster = Cluster(Path(directory))
        cluster.patience_s = 300.0
        try:
            return await _measured(cluster, plan, Random(seed), notify)
        finally:
            await cluster.close()


async def _measured(cluster: Cluster, plan: GatewayPlan, random: Random, notify: Notify) -> dict[str, Any]:
    began = time.monotonic()
    async with DisturbedFleet.running(cluster, workers=plan.workers) as fleet:
        notify(f"two gateways and {plan.workers} workers after {time.monotonic() - began:.0f} s")
        crowd = ConversationCrowd(fleet, plan, random)
        crowd.begin()
        await fleet.disturb(plan, random, notify)
        await crowd.finish()
        ledger, run = cluster.ledger(), await fleet.client.run(RUN_ID)
        version = run.newest.version if run.newest else 0
        wrong = wrong_answers(crowd.answered, ledger, tokens=plan.tokens, version=version)
        untrue = wrong_traces(crowd.traces, crowd.answered, version=version) if fleet.tells_traces else None
        return {
            "trace_mismatches": None if untrue is None else len(untrue),
            "client_errors_under_kills": len(crowd.errors),
            "wrong_answers": len(wrong),
            "examples": {"errors": crowd.errors[:10], "wrong": wrong[:10], "traces": (untrue or [])[:10]},
            "conversations": crowd.conversations,
            "turns": len(crowd.answered),
            "tokens": sum(len(turn.ids) for turn in crowd.answered),
            "doubled_tokens": doubled_tokens(crowd.answered, ledger),
            "came_back": crowd.came_back,
            "kills": fleet.kills,
            "counters": {name: count for name, count in run.counters.items() if count},
            "wall_s": round(time.monotonic() - began, 1),
        }
