"""How large the gateway's benchmark is."""

from typing import Final

from msgspec import Struct


class GatewayPlan(Struct, frozen=True, kw_only=True):
    """Sizes of the parts `kills` and `vllm`."""

    conversations: int = 100
    turns: int = 6  # of one conversation
    tokens: int = 64  # of one answer
    workers: int = 4
    worker_kills: int = 20
    pause_s: float = 2.0  # at least between two kills
    pairs: int = 10  # of blocks, one at each server
    requests: int = 40  # of a block, one after another
    rounds: int = 15  # of requests at once


#: On two cores: two minutes of kills, four beside vLLM, five of simulated turns, and two of turns on real engines.
QUICK_PLAN: Final = GatewayPlan(turns=4, tokens=32, pause_s=0.5, pairs=8, requests=12, rounds=5)
#: Requests at once, and their tokens, when processor time is measured.
AT_ONCE: Final = 32
TOKENS_IN: Final = 64
TOKENS_OUT: Final = 64
