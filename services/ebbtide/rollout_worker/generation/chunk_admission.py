"""Decides which rollouts an engine runs, so that it never lacks memory for keys and values by itself.

A rollout runs within a reservation: memory up to its next chunk's end, as in Seer's divided rollout (arXiv 2511.14617,
section 2.1 of its design). It gets the next chunk before it needs it. If there is none, the rollouts that came last
give up theirs and wait. Those that wait start in their order, each once its first chunk is free and all that run will
probably fit until they end: each grows by a token in each step until its likely end, when its memory is free again, as
in LightLLM's past-future scheduler (Gong et al., ASPLOS'25).

Nobody waits for ever: nobody passes the first one that waits, and the one that came first of all keeps its memory.
"""

from bisect import insort
from collections.abc import Sequence
from typing import Final

from msgspec import Struct

#: A chunk is so small a part of the memory, and no longer than this: half of each chunk lies idle on average. Seer has
#: longer ones because a rollout leaves its engine after each; here it stays.
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


class ChunkRules(Struct, frozen=True, kw_only=True):
    """How the memory of one engine is divided."""

    kv_tokens: int  # that fit into it
    block: int = 16  # tokens; memory is given in blocks
    slots: int = 1 << 30  # rollouts that run at once, at most
    lead: int = 8  # tokens that a rollout may make before the next decision

    @property
    def blocks(self) -> int:
        return self.kv_tokens // self.block

    @property
    def chunk(self) -> int:
        """Tokens."""
        return max(self.block + self.lead, min(_LONGEST, self.kv_tokens // _PART))

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


class ChunkDecision(Struct, frozen=True):
    """What changes now, in this order."""

    parked: tuple[str, ...] = ()  # give up their memory and wait
    grown: tuple[tuple[str, int], ...] = ()  # run on, up to the context named
    started: tuple[tuple[str, int], ...] = ()  # begin to run, up to the context named


def is_due(context: KvContext, rules: ChunkRules) -> bool:
    """Whether a running rollout needs its next chunk now."""
    return context.tokens + rules.lead >= context.reserved < context.tokens + context.most


def divide_memory(running: Sequence[KvContext], waiting: Sequence[KvContext], rules: ChunkRules) -> ChunkDecision:
    """Decide for one engine. `waiting`: in the order in which they start.

    The reservations afterwards fit the memory, unless a single rollout is longer than all of it.
    """
    book, parked = KvBook(rules), list[str]()
    by_age = {one.key: one for one in sorted(running, key=lambda one: (one.since_s, one.key))}
    for one in running:
        book.reserve(one, one.reserved)

    def make_room(blocks: int) -> None:
        """Have the last ones park until so many blocks are free, or one runs alone."""
        while book.free < blocks and len(by_age) > 1:
            key, last = by_age.popitem()
            book.release(last)
            parked.append(key)

    make_room(0)  # the memory may be smaller than it was
    grown = dict[str, int]()
    for one in [one for one in by_age.values() if is_due(one, rules)]:
        if one.key not in by_age:
            continue
        reserved = one.tokens + min(one.most, rules.chunk)
        if book.needed(one, reserved) > book.free:  # the least that lasts until the decision after the next
            reserved = max(one.reserved, one.tokens + min(one.most, 2 * rules.lead))
            make_room(book.needed(one, reserved))
        if one.key in by_age:
            grown[one.key] = max(one.reserved, reserved)
            book.reserve(one, grown[one.key])
    started = list[tuple[str, int]]()
    for one in waiting if not parked else ():
        reserved = one.tokens + min(one.most, rules.chunk)
        fits = book.needed(one, reserved) <= book.free and book.peak_with(one) <= rules.kv_tokens
        if len(book) >= rules.slots or (len(book) and not fits):
            break
        book.reserve(one, reserved)
        started.append((one.key, reserved))
    return ChunkDecision(tuple(parked), tuple(item for item in grown.items() if item[0] in by_age), tuple(started))


class KvBook:
    """The reservations of one engine.

    A prefix is counted once, while anybody has it.
    Invariant: `used` is the sum of all reservations' own blocks and of all prefixes' blocks.
    """

    def __init__(self, rules: ChunkRules) -> None:
        self._rules = rules
        self._own: dict[str, int] = {}  # blocks
        self._prefixes: dict[str, dict[str, int]] = {}  # blocks that each holder has of it
        self._rests: list[tuple[float, float, str]] = []  # the latest end first: less likely rest, own tokens, key
        self.used = 0

    def __len__(self) -> int:
        return len(self._own)

    @property
    def free(self) -> int:
        return self._rules.blocks - self.used

    def needed(self, context: KvContext, reserved: int) -> int:
        """Blocks that this reservation takes beyond those that are taken now."""
        return self._blocks(context, reserved) - self._own.get(context.key, 0) + self._prefix_growth(context)

    def freed(self, context: KvContext) -> int:
        """Blocks that would be free without it."""
        holders = self._prefixes.get(context.prefix, {})
        rest = max((blocks for key, blocks in holders.items() if key != context.key), default=0)
        return self._own[context.key] + max(holders.values(), default=0) - rest

    def reserve(self, context: KvContext, reserved: int) -> None:
        """Set its reservation, also in place of a former one."""
        self.used += self.needed(context, reserved)
        if context.key not in self._own:
            insort(self._rests, self._course(context))
        self._own[context.key] = self._blocks(context, reserved)
        if context.prefix:
            self._prefixes.setdefault(context.prefix, {})[context.key] = self._rules.shared_blocks(context)

    def release(self, context: KvContext) -> None:
        self.used -= self.freed(context)
        del self._own[context.key]
        self._rests.remove(self._course(context))
        if context.prefix:
            del self._prefixes[context.prefix][context.key]

    def peak_with(self, context: KvContext) -> float:
        """The most tokens that all, and this one, will probably hold at one moment. The peak is at some rollout's end:
        those that end later hold what they have now and the tokens of that time.
        """
        shared = sum(max(holders.values(), default=0) for holders in self._prefixes.values())
        base = float(self._rules.block * (shared + self._prefix_growth(context)))
        held = peak = 0.0
        course, rests = self._course(context), self._rests
        at = next((place for place, one in enumerate(rests) if one > course), len(rests))
        for count, (less_rest, own, _) in enumerate((*rests[:at], course, *rests[at:]), 1):
            held += own
            peak = max(peak, held - count * less_rest)
        return base + peak

    def _blocks(self, context: KvContext, reserved: int) -> int:
        return -(-reserved // self._rules.block) - self._rules.shared_blocks(context)

    def _prefix_growth(self, context: KvContext) -> int:
        if not context.prefix:
            return 0
        known = max(self._prefixes.get(context.prefix, {}).values(), default=0)
        return max(0, self._rules.shared_blocks(context) - known)

    def _course(self, context: KvContext) -> tuple[float, float, str]:
        rules = self._rules
        spare = 2 * rules.lead + rules.block / 2  # reserved ahead of its tokens, and the rest of its last block
        own = context.tokens - rules.block * rules.shared_blocks(context) + spare
        return -rules.likely_rest(context), own, context.key
