"""Defines what is known of the rollouts that share one engine's memory, and the rules that divide it."""

from typing import Final

from msgspec import Struct

#: The longest chunk is so small a part of the memory, and no longer than this: half of each chunk lies idle on average.
#: Seer has longer ones (arXiv 2511.14617) because a rollout leaves its engine after each; here it stays.
_PART: Final = 256
_LONGEST: Final = 1024
#: Without a forecast, a rollout is expected to make so small a part of the memory at first, and no more than this.
_UNKNOWN_PART: Final = 64
_UNKNOWN_MOST: Final = 8192


class KvContext(Struct, frozen=True, kw_only=True, gc=False):
    """A rollout that runs in the engine or waits for its memory. Counts are of tokens."""

    key: str
    prompt: int
    tokens: int  # of prompt and response, so far
    most: int  # that may still come
    since_s: float  # when it came to this engine; waiting again does not change it
    prefix: str = ""  # a name of its prompt, which others have too; empty: it shares nothing
    reserved: int = 0  # context up to which it has memory; 0: it waits
    rest: float | None = None  # expected to come; None: unknown
    longest_rest: float | None = None  # the same, as a high quantile


class ChunkRules(Struct, frozen=True, kw_only=True):
    """How the memory of one engine is divided."""

    kv_tokens: int  # that fit into it
    block: int = 16  # tokens; memory is given in blocks
    slots: int = 1 << 30  # rollouts that run at once, at most
    lead: int = 8  # tokens that a rollout may make before the next decision
    chunk: int = 0  # tokens of the longest chunk; 0: by the size of the memory
    filled: float = 1.0  # share of the memory that forecasts may fill
    patience_s: float = 300.0  # who waited or came longer ago is neither passed by nor sent away

    @property
    def blocks(self) -> int:
        return self.kv_tokens // self.block

    @property
    def longest_chunk(self) -> int:
        return max(self.block + self.lead, self.chunk or min(_LONGEST, self.kv_tokens // _PART))

    def shared_blocks(self, context: KvContext) -> int:
        """Full blocks of its prompt that others of its prefix use, too. An engine computes a prompt's last token anew
        for each, so that token's block is nobody else's."""
        return (context.prompt - 1) // self.block if context.prefix else 0

    def likely_rest(self, context: KvContext) -> float:
        """Tokens that probably come. Without a forecast, as many as there are: lengths have heavy tails."""
        made = context.tokens - context.prompt
        unknown = max(made, min(_UNKNOWN_MOST, self.kv_tokens // _UNKNOWN_PART))
        rest = context.rest if context.rest is not None else float(unknown)
        return min(float(context.most), max(0.0, rest))
