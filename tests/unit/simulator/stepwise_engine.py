"""The same engine as `SimulatedEngine` by a plain loop: one step at a time, one block at a time, tokens told apart."""

from collections import OrderedDict
from dataclasses import dataclass, field

from ebbtide.simulator.engines.engine_profile import EngineProfile

Tokens = tuple[object, ...]


@dataclass(eq=False)
class Block:
    content: int = 0  # of it and all blocks before it; 0: not known
    users: int = 0


class Blocks:
    """Real blocks in a queue of unused ones, as vLLM keeps them: unknown ones first, then the longest unused."""

    def __init__(self, count: int, *, caching: bool) -> None:
        self.caching = caching
        self.unused: OrderedDict[int, Block] = OrderedDict((id(one), one) for one in [Block() for _ in range(count)])
        self.known: dict[int, Block] = {}
        self._contents: dict[tuple[object, ...], int] = {}

    def content(self, salt: int, tokens: Tokens) -> int:
        return self._contents.setdefault((salt, tokens), len(self._contents) + 1)

    def take(self) -> Block:
        _, block = self.unused.popitem(last=False)
        if self.known.get(block.content) is block:
            del self.known[block.content]
        block.content, block.users = 0, 1
        return block

    def use(self, block: Block) -> None:
        block.users += 1
        self.unused.pop(id(block), None)

    def free(self, blocks: list[Block]) -> None:
        for block in reversed(blocks):
            block.users -= 1
            if not block.users:
                self.unused[id(block)] = block
                if self.known.get(block.content) is not block:
                    self.unused.move_to_end(id(block), last=False)

    def forget(self) -> None:
        for block in self.known.values():
            block.content = 0
        self.known.clear()


@dataclass(eq=False)
class Sequence:
    key: str
    prompt: Tokens
    made: int
    length: int
    cached: int
    again: bool
    ready: float
    fed: int = 0
    salt: int = 0
    started: bool = False  # has its first token since its admission
    decodes: bool = False  # has one since it was last read
    noted: int = 0  # blocks whose content was looked at
    blocks: list[Block] = field(default_factory=list)

    @property
    def known(self) -> int:
        return len(self.prompt) + self.made

    def tokens(self, count: int) -> Tokens:
        return (self.prompt + tuple((self.key, place) for place in range(self.made)))[:count]


class StepwiseEngine:
    def __init__(self, profile: EngineProfile, *, slots: int, now: float, speed: float = 1.0) -> None:
        self.profile, self.slots, self.speed, self.clock, self.late = profile, slots, speed, now, 0.0
        self.blocks = self._all_blocks()
        self.total = len(self.blocks.unused)
        self.run: list[Sequence] = []
        self.line: list[Sequence] = []
        self.events: list[tuple[float, str, str]] = []
        self.step: list[tuple[Sequence, int]] = []
        self.begin = self.end = -1.0
        self.held: float | None = None
        self.begun = self.salt = self.generated = self.read = self.reread = self.preemptions = 0
        self.busy_s = 0.0

    def _all_blocks(self) -> Blocks:
        kv = self.profile.kv
        return Blocks(kv.tokens // kv.block, caching=kv.prefix_cache)

    def admit(self, key: str, prompt: Tokens, made: int, length: int, now: float, cached: int = 0) -> None:
        self.settle(now)
        ready = self.clock + self.profile.delays.admit_s
        self.line.append(Sequence(key, prompt, made, length, cached, made > 0, ready))
        self.settle(now)

    def remove(self, key: str, now: float) -> int:
        self.settle(now)
        for sequence in [one for one in self.line if one.key == key]:
            self.line.remove(sequence)
            return sequence.made
        sequence = next(one for one in self.run if one.key == key)
        self.stop(sequence)
        return sequence.made

    def advance(self, now: float) -> list[tuple[float, str, str]]:
        self.settle(now)
        events, self.events = self.events, []
        return events

    def made(self, key: str) -> int:
        return next(one.made for one in [*self.run, *self.line] if one.key == key)

    def hold(self, now: float) -> None:
        self.settle(now)
        self.held = now if self.held is None else self.held

    def go_on(self, now: float) -> None:
        if self.held is not None:
            self.late, self.held = self.late + now - self.held, None
            self.settle(now)

    def new_weights(self, now: float) -> None:
        self.settle(now)
        self.salt += 1
        self.blocks.forget()
        for sequence in [one for one in self.run if not one.decodes]:
            self.stop(sequence)
            self.line.append(sequence)

    def clear(self, now: float) -> list[tuple[str, int]]:
        self.settle(now)
        lost = [(one.key, one.made) for one in [*self.run, *self.line]]
        if self.end >= 0:
            self.busy_s += self.clock - self.begin
        self.blocks, self.run, self.line, self.step, self.end = self._all_blocks(), [], [], [], -1.0
        return lost

    def settle(self, now: float) -> None:
        if self.held is not None:
            return
        until = max(self.clock, now - self.late)
        while True:
            if 0 <= self.end <= until:
                self.clock = self.end
                self.finish_step()
            elif self.end < 0 and self.line and max(self.clock, self.line[0].ready) <= until:
                self.clock = max(self.clock, self.line[0].ready)
            else:
                break
            self.schedule(self.clock)
        self.clock = until

    def finish_step(self) -> None:
        at, done = self.end + self.late, [one for one, _ in self.step if one in self.run and one.fed == one.known]
        self.busy_s += self.end - self.begin
        for sequence in done:
            sequence.decodes = True
            sequence.made += 1
            self.generated += 1
            if not sequence.started:
                sequence.started = True
                self.events.append((at, "started", sequence.key))
            if sequence.made == sequence.length:
                self.stop(sequence)
                self.events.append((at, "finished", sequence.key))

    def schedule(self, now: float) -> None:
        self.step, self.begun, preempted = [], 0, False
        room = self.profile.batched_tokens
        place = 0
        while place < len(self.run):
            sequence = self.run[place]
            # A decoding member behind a cut prompt cannot be: nobody starts before the prompt is read.
            tokens = min(sequence.known - sequence.fed, room)
            while not self.allocate(sequence, sequence.fed + tokens):
                preempted = True
                youngest = self.run[-1]
                self.stop(youngest)
                self.line.insert(0, youngest)
                youngest.again = True
                self.preemptions += 1
                self.events.append((now + self.late, "preempted", youngest.key))
                if youngest is sequence:
                    break
            else:
                self.feed(sequence, tokens)
                room -= tokens
                place += 1
        while not preempted and self.line and self.line[0].ready <= now and room and len(self.run) < self.slots:
            tokens = self.start(self.line[0], room)
            if not tokens:
                break
            self.begun += 1
            self.run.append(self.line.pop(0))
            room -= tokens
        self.begin, self.end = (now, now + self.seconds()) if self.run else (-1.0, -1.0)

    def start(self, sequence: Sequence, room: int) -> int:
        """Tokens that it reads in this step; 0: memory is short."""
        block = self.profile.kv.block
        found: list[Block] = []
        while (len(found) + 1) * block < sequence.known:
            content = self.blocks.content(self.salt, sequence.tokens((len(found) + 1) * block))
            if content not in self.blocks.known:
                break
            found.append(self.blocks.known[content])
        fed = max(len(found) * block, min(sequence.cached, sequence.known - 1))
        tokens = min(sequence.known - fed, room)
        most = sequence.known if self.profile.kv.whole_prompt_fits else fed + tokens
        if -(-most // block) - sum(one.users > 0 for one in found) > len(self.blocks.unused):
            return 0
        for one in found:
            self.blocks.use(one)
        sequence.blocks, sequence.fed, sequence.salt, sequence.noted = found, fed, self.salt, len(found)
        assert self.allocate(sequence, fed + tokens)
        self.feed(sequence, tokens)
        return tokens

    def allocate(self, sequence: Sequence, tokens: int) -> bool:
        need = -(-tokens // self.profile.kv.block) - len(sequence.blocks)
        if need > len(self.blocks.unused):
            return False
        sequence.blocks += [self.blocks.take() for _ in range(need)]
        return True

    def feed(self, sequence: Sequence, tokens: int) -> None:
        sequence.fed += tokens
        self.step.append((sequence, tokens))
        if not sequence.decodes:
            self.read += tokens
            self.reread += tokens if sequence.again else 0
        if self.blocks.caching and sequence.salt == self.salt:
            for place in range(sequence.noted, sequence.fed // self.profile.kv.block):
                content = self.blocks.content(sequence.salt, sequence.tokens((place + 1) * self.profile.kv.block))
                if content not in self.blocks.known:
                    sequence.blocks[place].content = content
                    self.blocks.known[content] = sequence.blocks[place]
                sequence.noted = place + 1

    def seconds(self) -> float:
        """Of the step just scheduled, summed token by token."""
        decoding = [one for one, _ in self.step if one.decodes]
        read = [(one, tokens) for one, tokens in self.step if not one.decodes]
        pairs = sum(place + 1 for one, tokens in read for place in range(one.fed - tokens, one.fed))
        seconds = self.profile.costs.step_s(
            batch=len(decoding),
            context=sum(one.fed for one in decoding),
            prefill=sum(tokens for _, tokens in read),
            pairs=pairs,
            prompts=self.begun,
        )
        return seconds / self.speed

    def stop(self, sequence: Sequence) -> None:
        self.run.remove(sequence)
        self.blocks.free(sequence.blocks)
        sequence.again = sequence.again or sequence.fed > 0
        sequence.blocks, sequence.fed, sequence.decodes = [], 0, False

    @property
    def kv_tokens(self) -> int:
        return (self.total - len(self.blocks.unused)) * self.profile.kv.block

    @property
    def busy(self) -> float:
        return self.busy_s + (self.clock - self.begin if self.end >= 0 else 0.0)
