"""Reads the prompts of one engine's sequences, in parts of at most what a step has room for.

Invariant: at most one sequence is cut, that is, read in part. No other starts before the rest of it is read.
"""

from typing import Final

from ebbtide.simulator.engines.decoding_batch import EngineSequence
from ebbtide.simulator.engines.engine_profile import EngineProfile
from ebbtide.simulator.engines.kv_prefixes import KvPrefix, KvPrefixes

#: Behind a prompt's name, the name of its last block.
_TAIL: Final = "\0"


class PromptReader:
    """`room`: tokens that the step still has room for; `tokens`, `pairs`: what it reads, and the pairs of a token read
    and one that it attends to; `begun`: sequences that it begins to read; `complete`: those that are whole when it
    ends."""

    def __init__(self, profile: EngineProfile, prefixes: KvPrefixes) -> None:
        self._whole = profile.kv.whole_prompt_fits
        self._prefixes = prefixes
        self._cut: EngineSequence | None = None
        self.room = self.tokens = self.pairs = self.begun = 0
        self.complete: list[EngineSequence] = []
        self.read = self.reread = 0  # see `SimulatedEngine`

    def restart(self, prefixes: KvPrefixes) -> None:
        """Everything is lost but the counts."""
        self._prefixes, self._cut = prefixes, None

    def drop(self, sequence: EngineSequence) -> None:
        if self._cut is sequence:
            self._cut = None

    def new_blocks(self, room: int) -> int:
        """Blocks that the cut sequence needs in a step with so much room."""
        if self._cut is None:
            return 0
        known, fed = self._cut.known, self._cut.fed
        return self._prefixes.blocks_of(min(known, fed + room)) - self._prefixes.blocks_of(fed)

    def begin_step(self, room: int) -> None:
        """Goes on with the cut sequence, whose blocks are free."""
        self.room, self.tokens, self.pairs, self.begun, self.complete = room, 0, 0, 0, []
        if self._cut is not None:
            self._read(self._cut)

    def start(self, sequence: EngineSequence) -> bool:
        """Begins to read a sequence, unless memory is short. Returns whether it does."""
        prefixes = self._prefixes
        parent = self._known(sequence)
        start = parent.end if parent else 0
        fed = max(start * prefixes.block, min(sequence.cached, sequence.known - 1))
        most = sequence.known if self._whole else min(sequence.known, fed + self.room)
        if prefixes.blocks_of(most) - start + prefixes.unused_in(parent) > prefixes.free:
            return False
        if parent is None and sequence.prefix and not sequence.after and prefixes.caching:
            parent = prefixes.begin(sequence.prefix)
        if parent is not None:
            prefixes.hold(parent)
        prefixes.take(prefixes.blocks_of(fed) - start)
        sequence.parent, sequence.start, sequence.fed, sequence.salt = parent, start, fed, prefixes.salt
        self.begun += 1
        self._read(sequence)
        return True

    def _known(self, sequence: EngineSequence) -> KvPrefix | None:
        """What the cache has of it. At least its last token is read, as its logits are needed."""
        block = self._prefixes.block
        shared, own = min(sequence.prompt, sequence.known - 1) // block, (sequence.known - 1) // block
        names = (
            (sequence.prefix + _TAIL, shared),
            (sequence.prefix, shared),
            *((turn, own) for turn in sequence.after),
            (sequence.key, own),
        )
        best: KvPrefix | None = None
        for name, most in names:
            found = self._prefixes.find(name, most)
            if found is not None and found.end > (best.end if best else 0):
                best = found
        return best

    def _read(self, sequence: EngineSequence) -> None:
        tokens = min(sequence.known - sequence.fed, self.room)
        self._prefixes.take(self._prefixes.blocks_of(sequence.fed + tokens) - self._prefixes.blocks_of(sequence.fed))
        self.pairs += tokens * sequence.fed + tokens * (tokens + 1) // 2
        self.tokens += tokens
        self.room -= tokens
        self.read += tokens
        self.reread += tokens if sequence.again else 0
        sequence.fed += tokens
        self._share(sequence)
        self._cut = sequence if sequence.fed < sequence.known else None
        if self._cut is None:
            self.complete.append(sequence)

    def _share(self, sequence: EngineSequence) -> None:
        """Lets others use the whole blocks of its prompt, as soon as they are read, under the prompt's name.

        A prompt may end with a block. Those who have no more than the prompt cannot use that block, as they need the
        last token's logits. So it is a part of its own.
        """
        parent, prefixes = sequence.parent, self._prefixes
        if parent is None or not parent.shared or sequence.after:
            return
        end = min(sequence.fed, sequence.prompt - 1) // prefixes.block
        if end > parent.end:
            parent.blocks += end - parent.end
            sequence.start = end
        prompt, rest = divmod(sequence.prompt, prefixes.block)
        tail = sequence.prefix + _TAIL
        if not rest and sequence.fed >= sequence.prompt and parent.end == prompt - 1 and not prefixes.knows(tail):
            sequence.parent = prefixes.split_off(parent, tail)
            sequence.start = prompt
