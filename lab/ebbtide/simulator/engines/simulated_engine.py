"""Simulates one engine with continuous batching: closed forms between events, no work per token or step.

It schedules as vLLM's V1 does. A step decodes one token of each running sequence, and what is left of the step's tokens
reads prompts: first the rest of the one that was cut, then waiting ones in their order. A decoding sequence that finds
no block takes those of the youngest, which goes to the head of the waiting ones and is read again. No sequence starts
in a step that preempted one.

Invariant: `_run` is the steps under way, and what is computed in them is fixed: changes wait for the end of the step.
`_steps` counts the steps before `_run`. Blocks are taken for the first step of `_run`, and for later ones when it ends.
`_running` is in the order of starts; only its last member may be reading.
"""

from collections import OrderedDict
from collections.abc import Iterable
from enum import Enum
from math import inf
from typing import NamedTuple

from ebbtide.errors import InvalidRequest
from ebbtide.simulator.engines.decoding_batch import DecodingBatch, EngineSequence, StepRun
from ebbtide.simulator.engines.engine_profile import EngineProfile
from ebbtide.simulator.engines.kv_prefixes import KvPrefixes
from ebbtide.simulator.engines.prompt_reader import PromptReader


class EngineEventKind(Enum):
    STARTED = "started"  # the first new token since its admission
    FINISHED = "finished"
    PREEMPTED = "preempted"  # by the engine, for want of memory; it waits to be read again


class EngineEvent(NamedTuple):
    at: float  # seconds
    kind: EngineEventKind
    key: str


class ReadCounts(NamedTuple):
    """Steps that have read prompts."""

    reads: int
    tokens: int
    seconds: float


class SimulatedEngine:
    """One engine. Times are seconds of the simulation and never go back. Every call that is handed `now` first lets the
    engine compute until then; events that come up meanwhile are returned by the next `advance`."""

    def __init__(self, profile: EngineProfile, *, slots: int, now: float, speed: float = 1.0) -> None:
        """`slots`: sequences that run at once; `speed`: of its steps, as a multiple of the profile's."""
        slots = min(slots, profile.sequences)
        if profile.batched_tokens < slots:
            text = f"must be at least the {slots} sequences that run at once"
            raise InvalidRequest(text, field=f"engine profile {profile.name}: batched_tokens")
        if profile.costs.step_s(batch=1, context=1) <= 0.0:
            raise InvalidRequest("a step must take time", field=f"engine profile {profile.name}: costs")
        self._profile, self._slots, self._speed = profile, slots, speed
        self._prefixes = KvPrefixes(profile.kv)
        self._batch = DecodingBatch(profile.kv.block)
        self._reader = PromptReader(profile, self._prefixes)
        self._running: dict[str, EngineSequence] = {}
        self._waiting: OrderedDict[str, EngineSequence] = OrderedDict()
        self._events: list[EngineEvent] = []
        self._run: StepRun | None = None
        self._steps = self._starts = 0
        self._joining: list[EngineSequence] = []  # have their first token at the end of the step under way
        self._at, self._late = now, 0.0  # its own time, which stands still while it is held, and how far that is behind
        self._held_at: float | None = None
        self._busy_s = 0.0
        self._generated = 0
        self._reading = 0  # tokens that the step under way reads
        self.reads = ReadCounts(0, 0, 0.0)
        self.preemptions = 0

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def read(self) -> int:
        """Tokens read, without those found in the cache. A part of a prompt counts from the begin of its step."""
        return self._reader.read

    @property
    def reread(self) -> int:
        """Of these, what was read or made before, here or elsewhere."""
        return self._reader.reread

    @property
    def generated(self) -> int:
        """Tokens made by the last call."""
        return self._generated + (self._batch.size * self._run.done if self._run else 0)

    @property
    def busy_s(self) -> float:
        """Seconds in which a step was under way."""
        return self._busy_s + (self._at - self._run.begin if self._run else 0.0)

    @property
    def context(self) -> int:
        """Tokens of prompt and response of the decoding sequences, over all of them."""
        return self._batch.context(self._steps + (self._run.done if self._run else 0)) + self._batch.size

    @property
    def kv_tokens(self) -> int:
        """Tokens' worth of memory that running sequences hold."""
        return self._prefixes.used * self._prefixes.block

    def admit(
        self,
        key: str,
        *,
        prompt: int,
        made: int,
        length: int,
        now: float,
        prefix: str = "",
        after: tuple[str, ...] = (),
        cached: int = 0,
        copy_s: float = 0.0,
        text: str = "",
    ) -> None:
        """Takes a sequence, which waits for a slot and for memory.

        `length`: tokens that the whole response will have; `made`: of these exist already, so they are read with the
        prompt. `prefix`: a name of the prompt that its group shares; `after`: the keys of the turns before, the last
        one first: the prompt begins with all tokens of each, behind those of the group's. `cached`: tokens whose keys
        and values it brings along, which takes `copy_s`. `text`: its episode's name for `forget`; by default its key.
        Raises `InvalidRequest` if it could not run even alone.
        """
        blocks = self._prefixes.blocks_of(prompt + length - 1)
        if blocks > self._prefixes.total:
            text = f"{self._profile.kv.tokens} cannot hold a prompt of {prompt} and a response of {length} tokens"
            raise InvalidRequest(text, field=f"engine profile {self._profile.name}: kv.tokens")
        if not 0 <= made < length or prompt < 1 or key in self._running or key in self._waiting:
            raise ValueError(f"{key}: {made} of {length} tokens behind a prompt of {prompt}, or it is here already")
        self._settle(now)
        ready = self._at + self._profile.delays.admit_s + copy_s
        self._waiting[key] = EngineSequence(key, prompt, made, length, prefix, after, cached, text or key, ready)
        if len(self._waiting) == 1:  # else the first one lacks a slot or memory, and this one comes behind it
            self._finish_step()
            self._wake()

    def forget(self, texts: Iterable[str]) -> None:
        """No sequence will begin with these: what is cached of them alone is evicted first."""
        for text in texts:
            self._prefixes.end(text)

    def remove(self, key: str, now: float) -> int:
        """Hands a sequence back: tokens of its response that are made. It must be here, so `advance` first."""
        self._settle(now)
        sequence = self._waiting.get(key) or self._running[key]
        made = self.made(key)
        self._finish_step()
        if self._waiting.pop(key, None) is None:
            self._stop(sequence, self._steps + 1)
        return made

    def advance(self, now: float) -> list[EngineEvent]:
        """Computes until `now`. Returns what happened since the last call, in the order of time."""
        self._settle(now)
        events, self._events = self._events, []
        return events

    def next_event(self) -> float:
        """No event comes before this time if nothing changes; inf: none at all. There may be none at it either, as
        when a part of a prompt is read: then ask again."""
        if self._events:
            return self._events[0].at
        if self._held_at is not None:
            return inf
        return self._next_at + self._late

    def made(self, key: str) -> int:
        """Tokens of a sequence's response by the last call."""
        sequence = self._running.get(key) or self._waiting[key]
        return sequence.made_after(self._steps + (self._run.done if self._run else 0))

    def runs(self, key: str) -> bool:
        """Whether a sequence has memory, by the last call; others wait, or are not here."""
        return key in self._running

    def hold(self, now: float) -> None:
        """Stands still, also in the middle of a step, until `go_on`. Sequences keep their keys and values."""
        self._settle(now)
        if self._held_at is None:
            self._held_at = now

    def go_on(self, now: float) -> None:
        if self._held_at is not None:
            self._late += now - self._held_at
            self._held_at = None
            self._settle(now)

    def pace(self, speed: float, now: float) -> None:
        """Steps at another speed, as a multiple of the profile's. The rest of the step under way is rescaled, too."""
        self._settle(now)
        self._finish_step()
        run = self._run
        if run is not None:
            rest_s = (run.end - self._at) * self._speed / speed
            self._run = StepRun(run.begin, 1, self._at - run.begin + rest_s, 0.0)
        self._speed = speed

    def new_weights(self, now: float) -> None:
        """Other weights were installed. Nothing cached is used again, and sequences without a token of this engine are
        read again, behind those that wait."""
        self._settle(now)
        self._finish_step()
        self._prefixes.forget()
        for sequence in [one for one in self._running.values() if not one.decoding]:
            self._stop(sequence, self._steps + 1)
            self._waiting[sequence.key] = sequence

    def clear(self, now: float) -> list[tuple[str, int]]:
        """Everything is lost: the keys in the order of their starts, and the tokens of each that were made."""
        self._settle(now)
        lost = [(key, self.made(key)) for key in (*self._running, *self._waiting)]
        self._generated, self._busy_s = self.generated, self.busy_s
        self._prefixes = KvPrefixes(self._profile.kv)
        self._batch = DecodingBatch(self._profile.kv.block)
        self._reader.restart(self._prefixes)
        self._running, self._waiting, self._joining, self._run = {}, OrderedDict(), [], None
        return lost

    def _settle(self, now: float) -> None:
        """Computes until `now`."""
        if self._held_at is not None:
            return
        until = max(self._at, now - self._late)
        while self._next_at <= until or self._next_at + self._late <= now:  # rounding may leave it a trifle behind
            self._at = max(self._at, self._next_at)
            if self._run is not None:
                self._end_run(self._run)
            else:
                self._plan(self._at)
        self._at = max(self._at, until)
        if self._run is not None:
            self._run.follow(self._at)

    @property
    def _next_at(self) -> float:
        """When the run of steps under way ends; if there is none, when one begins. In its own time."""
        return self._run.end if self._run else max(self._at, self._ready)

    @property
    def _ready(self) -> float:
        """When the first waiting sequence may be read; inf if none waits."""
        return next(iter(self._waiting.values())).ready if self._waiting else inf

    def _wake(self) -> None:
        if self._run is None and self._held_at is None and self._ready <= self._at:
            self._plan(self._at)

    def _finish_step(self) -> None:
        """Makes the step under way the last one before the next plan."""
        run = self._run
        if run is not None and run.steps > 1:
            self._commit(run, run.done)
            self._prefixes.take(self._batch.new_blocks(self._steps + 1) if run.done else 0)
            self._run = StepRun(run.after(run.done), 1, run.first_s + run.done * run.growth_s, 0.0)

    def _commit(self, run: StepRun, steps: int) -> None:
        """So many steps of the run belong to the past. The first one's blocks were taken before."""
        self._prefixes.take(self._batch.new_blocks_between(self._steps + 1, self._steps + steps) if steps > 1 else 0)
        self._steps += steps
        self._generated += self._batch.size * steps
        self._busy_s += run.after(steps) - run.begin

    def _end_run(self, run: StepRun) -> None:
        self._commit(run, run.steps)
        if self._reading:
            reads, tokens, seconds = self.reads
            self.reads = ReadCounts(reads + 1, tokens + self._reading, seconds + run.end - run.begin)
        self._run = None
        at = run.end + self._late
        self._finish(at)
        for sequence in self._joining:
            if self._running.get(sequence.key) is sequence:  # else it was handed back meanwhile
                self._generated += 1
                self._batch.add(sequence, self._steps)
                if not sequence.started:
                    sequence.started = True
                    self._events.append(EngineEvent(at, EngineEventKind.STARTED, sequence.key))
                self._finish(at)
        self._joining = []
        self._plan(run.end)

    def _finish(self, at: float) -> None:
        for sequence in self._batch.ended(self._steps):
            self._stop(sequence, self._steps)
            self._events.append(EngineEvent(at, EngineEventKind.FINISHED, sequence.key))

    def _stop(self, sequence: EngineSequence, step: int) -> None:
        """It computes nothing after `step`; what it was fed by then stays known."""
        del self._running[sequence.key]
        fed = sequence.fed_in(step)
        if sequence.decoding:
            sequence.made = sequence.made_after(self._steps)
            self._batch.remove(sequence)
        self._reader.drop(sequence)
        start, salt = sequence.start, sequence.salt
        self._prefixes.release(sequence.key, sequence.parent, start, fed, salt, text=sequence.text)
        sequence.stop()

    def _plan(self, now: float) -> None:
        """Decides what the next steps compute."""
        step = self._steps + 1
        preempted = self._make_room(step, now)
        self._prefixes.take(self._batch.new_blocks(step))
        self._reader.begin_step(self._room)
        if not preempted:
            self._start_waiting(now)
        self._joining = self._reader.complete
        if not self._running:
            return
        costs, size, reader = self._profile.costs, self._batch.size, self._reader
        self._reading = reader.tokens
        first_s = costs.step_s(
            batch=size,
            context=self._batch.context(step),
            prefill=reader.tokens,
            pairs=reader.pairs,
            prompts=reader.begun,
        )
        first_s /= self._speed
        growth_s = costs.context_s * size / self._speed
        steps = 1 if reader.tokens or preempted else self._steps_alike(step)
        run = StepRun(now, steps, first_s, growth_s)
        if now < self._ready < run.end and len(self._running) < self._slots:
            run = StepRun(now, run.steps_until(self._ready), first_s, growth_s)  # then the waiting one may join
        self._run = run

    @property
    def _room(self) -> int:
        """Tokens of prompts that fit into a step."""
        return self._profile.batched_tokens - self._batch.size

    def _steps_alike(self, step: int) -> int:
        """From `step` on, the steps until a sequence has all its tokens or memory is exhausted."""
        return self._batch.steps_within(step, self._batch.next_end(), self._prefixes.free) - self._steps

    def _make_room(self, step: int, now: float) -> bool:
        """Preempts the youngest sequences until the others find the blocks that they need. Returns whether any was."""
        preempted = False
        while self._batch.new_blocks(step) + self._reader.new_blocks(self._room) > self._prefixes.free:
            preempted = True
            sequence = self._running[next(reversed(self._running))]
            self._stop(sequence, self._steps)
            self._waiting[sequence.key] = sequence
            self._waiting.move_to_end(sequence.key, last=False)
            self.preemptions += 1
            self._events.append(EngineEvent(now + self._late, EngineEventKind.PREEMPTED, sequence.key))
        return preempted

    def _start_waiting(self, now: float) -> None:
        while self._ready <= now and self._reader.room and len(self._running) < self._slots:
            key, sequence = next(iter(self._waiting.items()))
            if not self._reader.start(sequence):
                return
            del self._waiting[key]
            self._starts += 1
            sequence.order = self._starts
            self._running[key] = sequence
