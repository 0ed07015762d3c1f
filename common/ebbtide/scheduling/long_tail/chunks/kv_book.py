"""Counts the blocks that reservations take, and forecasts the most that they will take at one moment."""

from bisect import insort

from ebbtide.scheduling.long_tail.chunks.kv_contexts import ChunkRules, KvContext


class KvBook:
    """The reservations of one engine.

    A prefix is counted once, while anybody has it. The forecast lets each rollout grow by a token in each step until
    its likely end, when its memory is free again, as in LightLLM's past-future scheduler (Gong et al., ASPLOS'25).
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
