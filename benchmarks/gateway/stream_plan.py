"""How many streams there are, how fast they are, and how long their gateway is watched."""

from typing import Final

from msgspec import Struct

#: Entries of the tokenizer.
ENTRIES: Final = 150_000
#: vLLM's names of the parsers.
TOOL_PARSER, REASONING_PARSER = "hermes", "qwen3"
#: File in the model's folder of the token ids that all workers generate.
SCRIPT: Final = "script.npy"
#: Tokens of one event of a stream, and the seconds between two.
EVENT_TOKENS: Final = 8
EVENT_S: Final = 2.0
#: A rollout of at most so many tokens is made at once.
SHORT: Final = 16
#: What a stream may have: more than it gets while anybody looks.
STREAM_TOKENS: Final = 4000


class StreamPlan(Struct, frozen=True, kw_only=True):
    few: int = 64
    many: int = 4096
    keys: int = 8
    one_key: int = 1025  # streams of one key; the gateway's limit is one less
    greedy: int = 8  # requests at once of a key that asks for many completions
    completions: int = 128  # of each of them
    greedy_tokens: int = 32  # of each completion: four events
    rounds: int = 3  # of blocks in turn
    block_s: float = 40.0
    settle_s: float = 5.0  # behind the opening of streams
    workers: int = 8
    slots: int = 640  # of each


QUICK_STREAMS: Final = StreamPlan(rounds=1, block_s=25.0)
