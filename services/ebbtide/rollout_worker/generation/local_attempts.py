"""Holds this worker's attempts: from an assignment to a response that is durable in the store.

Invariant: an attempt is held from its start until its finish is durable, or it is cancelled, superseded or released,
and its output is in the outbox exactly as long. At most one task generates for it. The ledger counts tokens before
anything else sees them. A reason to hold generation stands in `GenerationHolds.reasons` from the begin of the hold to
its end; watchers hear of each change, so heartbeats say at once whether tokens are to be expected. When this process
dies, each rollout goes on elsewhere from its last stored token.
"""

import asyncio
import time
from collections.abc import Callable, Iterable
from contextlib import aclosing
from typing import Final, NamedTuple

from ebbtide import telemetry
from ebbtide.append_stream import AppendAck
from ebbtide.errors import EbbtideError
from ebbtide.ledger import Ledger
from ebbtide.rollout_worker import metrics
from ebbtide.rollout_worker.engine import Engine, EngineFailed
from ebbtide.rollout_worker.generation.generation import Assignment, Generation, PromptScoring
from ebbtide.rollout_worker.generation.kv_gate import KvGate, KvTicket
from ebbtide.rollout_worker.generation.outbox import Outbox, OutboxMessage
from ebbtide.types.fleet import AttemptRef, EndCause, EngineInfo
from ebbtide.types.tokens import token_count
from ebbtide.types.weights import PolicyVersion

log = telemetry.get_logger(__name__)

#: A released attempt ends after the next tokens that its engine makes, or after this time if none come.
_LAST_TOKENS_S: Final = 0.25
#: Tokens of a paused engine may still be on their way for so long.
_SETTLE_S: Final = 0.02
#: First tokens within so many seconds left the engine with one step: that was one read.
_STEP_S: Final = 1e-3


class ReleaseReason(NamedTuple):
    """Why an attempt goes back to the coordinator."""

    cause: EndCause
    text: str  # for people


SHORT_CONTEXT: Final = ReleaseReason(EndCause.SHORT_CONTEXT, "it needs a longer context than its worker's")


class GenerationHolds:
    """Keeps the reasons to hold generation on purpose (an install, a slow store, a drain), and tells watchers."""

    def __init__(self) -> None:
        self.reasons: set[str] = set()
        self._watchers: list[Callable[[], None]] = []

    def __bool__(self) -> bool:
        return bool(self.reasons)

    def __contains__(self, reason: str) -> bool:
        return reason in self.reasons

    def watch(self, changed: Callable[[], None]) -> None:
        """Have `changed` called after every change, and when other work that matters to heartbeats begins or ends."""
        self._watchers.append(changed)

    def begin(self, reason: str) -> None:
        self.reasons.add(reason)
        self.tell()

    def end(self, reason: str) -> None:
        self.reasons.discard(reason)
        self.tell()

    def tell(self) -> None:
        for changed in self._watchers:
            changed()


class LocalAttempt:
    """One attempt."""

    def __init__(self, assignment: Assignment, generation: Generation | PromptScoring, entry: int) -> None:
        self.assignment, self.generation, self.entry = assignment, generation, entry  # `entry`: in the ledger
        self.task: asyncio.Task[None] | None = None
        self.started = False
        self.releasing: ReleaseReason | None = None  # if set, it goes back once all its tokens are stored


class LocalAttempts:
    """All attempts held, and the tasks that generate for them."""

    def __init__(
        self,
        engine: Engine,
        info: EngineInfo,
        outbox: Outbox,
        ledger: Ledger | None,
        *,
        release: Callable[[list[AttemptRef], ReleaseReason], None],
        fail: Callable[[BaseException], None],
        slots: int = 1 << 16,
        by_memory: bool = True,
        stream_interval: int = 1,
    ) -> None:
        """`release` hands attempts back to the coordinator; `fail` is called when the engine is lost. `slots`: rollouts
        that the engine runs at once; `by_memory`: attempts wait until it has memory for them. `stream_interval`: tokens
        of a batch rollout that the engine delivers together; `message` and `collect` fetch those that it still holds.
        """
        self.engine, self.info, self._outbox, self._ledger = engine, info, outbox, ledger
        self._release, self._fail = release, fail
        self._held: dict[str, LocalAttempt] = {}
        self.ended = asyncio.Event()  # set when a generation ends
        self.empty = asyncio.Event()  # set while nothing is held
        self.empty.set()
        self.due = asyncio.Event()  # set when the next message is due earlier than it was
        self.pressure = asyncio.Event()  # set when the outbox is behind, and whenever it may be no longer
        self.holds = GenerationHolds()
        self.holds.watch(self._owe)
        self.tokens = 0
        self.reading = PromptReading()
        self._stream_interval = stream_interval
        self.gate = KvGate(info, slots, limits=by_memory, parked=self.engine.deliver)
        self._busy_s = self._busy_since = 0.0
        self._owing_since = 0.0  # time of the newest token, or since then of new work or a changed hold

    def __contains__(self, attempt_id: str) -> bool:
        return attempt_id in self._held

    @property
    def running(self) -> int:
        return sum(held.task is not None for held in self._held.values())

    @property
    def waiting(self) -> int:
        return sum(held.task is not None and not held.started for held in self._held.values())

    @property
    def busy_s(self) -> float:
        """Seconds with at least one rollout in the engine."""
        return self._busy_s + (time.monotonic() - self._busy_since if self._busy_since else 0.0)

    @property
    def quiet_s(self) -> float:
        """Seconds for which the engine has made no token, although it had work and was not held."""
        return time.monotonic() - self._owing_since if self._busy_since and not self.holds else 0.0

    def engine_changed(self, info: EngineInfo) -> None:
        """The engine has restarted and is now `info`. No attempt may be running."""
        self.info = info
        self.gate.engine_changed(info)

    def start(self, assignment: Assignment) -> None:
        """Take an attempt and generate for it. Raises `InvalidRequest` if this engine cannot."""
        ref = assignment.attempt
        generation = self._generation(assignment)
        entry = self._ledger.open(ref, token_count(assignment.partial)) if self._ledger else 0
        held = self._held[ref.attempt_id] = LocalAttempt(assignment, generation, entry)
        self.empty.clear()
        whole = isinstance(generation, PromptScoring)
        self._outbox.open(ref, assignment.partial, interactive=assignment.interactive, whole=whole)
        if generation.finish is None:
            held.task = asyncio.create_task(self._generate(held), name=f"generate {ref.rollout_id}")
            held.task.add_done_callback(lambda task: self._ended(held, task))
            if not self._busy_since:
                self._busy_since = self._owing_since = time.monotonic()
        else:
            self._outbox.finish(ref.attempt_id, generation.finish, time.monotonic())
            self.due.set()

    def _generation(self, assignment: Assignment) -> Generation | PromptScoring:
        if assignment.prompt_logprobs is None:
            return Generation(assignment, self.info, self.engine.decode, stream_interval=self._stream_interval)
        return PromptScoring(assignment, self.info, self.engine.decode)

    def drop(self, refs: Iterable[AttemptRef], outcome: str) -> None:
        """Stop generating for these attempts and forget them."""
        for ref in refs:
            self._outbox.drop(ref.attempt_id)
            if held := self._held.pop(ref.attempt_id, None):
                metrics.ATTEMPTS.labels(outcome).inc()
                log.debug("attempt ended", run_id=ref.run_id, rollout_id=ref.rollout_id, outcome=outcome)
                if held.task is not None:
                    held.task.cancel()
                elif self._ledger:
                    self._ledger.end(held.entry)
        if not self._held:
            self.empty.set()
        self.pressure.set()

    def forget_cached(self, episode_ids: Iterable[str]) -> None:
        """What the engine has cached of these episodes will not be continued."""
        if names := list(episode_ids):
            self.engine.forget(names)

    def settle(self, acks: Iterable[AppendAck], *, durable: bool) -> None:
        """Apply acknowledgements; `durable`: no single failure of the store loses what they name."""
        due = self._outbox.due
        done = self._outbox.settle(acks, durable=durable, now=time.monotonic())
        if self._outbox.due < due:
            self.due.set()
        self.drop(done.finished, "finished")
        self.drop(done.superseded, "superseded")
        self._release_stored()
        self.pressure.set()

    def check(self) -> None:
        """Call `fail` if the engine is lost."""
        try:
            self.engine.check()
        except EngineFailed as error:
            self._fail(error)

    def release(self, refs: Iterable[AttemptRef], why: ReleaseReason) -> None:
        """Hand these back, each once all its tokens are stored. Finished and unknown ones are ignored."""
        for ref in refs:
            held = self._held.get(ref.attempt_id)
            if held is None or held.releasing or held.task is None:
                continue
            held.releasing = why
            if held.started and not self.gate.holds_back(ref.attempt_id):
                self.engine.deliver(ref.attempt_id)
                patience_s = _SETTLE_S if self.holds else _LAST_TOKENS_S
                asyncio.get_running_loop().call_later(patience_s, held.task.cancel)
            else:
                held.task.cancel()

    async def hand_over(self, why: ReleaseReason, *, patience_s: float) -> None:
        """Stop all generation; release each attempt once it is stored. `patience_s`: for a busy engine to pause."""
        self.holds.begin("drain")
        try:
            async with asyncio.timeout(patience_s):
                await self.engine.pause("drain")  # tokens that it has made still come out
                await asyncio.sleep(_SETTLE_S)
        except TimeoutError:
            log.warning("the engine did not pause in time: its unread tokens are lost")
        except EngineFailed as error:
            log.warning("the engine is lost, with its unread tokens", reason=str(error))
        await self.collect()
        for held in self._held.values():
            if held.generation.finish is None:
                held.releasing = held.releasing or why
        await self.close()
        self.flush()
        self._release_stored()

    async def collect(self) -> None:
        """Take the tokens that the engine has made and holds back."""
        self.engine.deliver()
        await asyncio.sleep(0)  # all readers that wait for them run before this task does

    async def message(self) -> OutboxMessage:
        """The outbox's next message. If it has all unsent tokens, then also those that the engine holds back."""
        if self._stream_interval > 1 and self._outbox.takes_all(time.monotonic()):
            await self.collect()
        return self._outbox.take(time.monotonic())

    async def close(self) -> None:
        """Stop all generation."""
        tasks = [held.task for held in self._held.values() if held.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def admit(self, run_id: str, version: PolicyVersion) -> bool:
        """Whether all running attempts may go on under `version` of the run's policy."""
        return all(
            held.assignment.attempt.run_id == run_id
            and held.assignment.policy == version.policy
            and held.assignment.admits(version.version)
            for held in self._held.values()
            if held.task is not None
        )

    async def _generate(self, held: LocalAttempt) -> None:
        ref = held.assignment.attempt
        try:
            if held.generation.outgrown:
                held.releasing = SHORT_CONTEXT
                return
            ticket = self._ticket(held)
            while held.generation.finish is None and not held.releasing:
                async with self.gate.room(ticket):
                    await self._run(held, ticket)
        except EngineFailed as error:
            held.releasing = ReleaseReason(EndCause.FAILED, f"stopped: {error}")
            self._fail(error)
        except EbbtideError as error:
            held.releasing = ReleaseReason(EndCause.FAILED, str(error))
            log.warning("attempt failed", run_id=ref.run_id, rollout_id=ref.rollout_id, reason=str(error))

    def _ticket(self, held: LocalAttempt) -> KvTicket:
        assignment = held.assignment
        request, forecast = held.generation.request(), assignment.expected_tokens
        return self.gate.ticket(request, assignment.prompt_ids, forecast=forecast, first=assignment.interactive)

    async def _run(self, held: LocalAttempt, ticket: KvTicket) -> None:
        """Generate until the response ends, or the attempt is to leave the engine."""
        attempt_id, request = held.assignment.attempt.attempt_id, held.generation.request()
        scored, read = held.assignment.prompt_logprobs is not None, False
        self.reading.begin(attempt_id, time.monotonic(), scored=scored)
        async with aclosing(self.engine.generate(request)) as stream:
            async for delta in stream:
                if not read:
                    self.reading.first_token(attempt_id, len(request.token_ids), delta.cached, time.monotonic())
                    read = True
                self._count(held, held.generation.accept(delta))
                self.gate.made(ticket, len(delta.ids), delta.versions[-1] if delta.versions else 0)
                if held.generation.outgrown:
                    held.releasing = held.releasing or SHORT_CONTEXT
                if held.generation.finish is not None or held.releasing or ticket.parked:
                    return
        held.releasing = held.releasing or ReleaseReason(EndCause.FAILED, "the engine ended the request")

    def _count(self, held: LocalAttempt, tokens: bytes) -> None:
        count = held.generation.generated(tokens)
        if self._ledger:
            self._ledger.add(held.entry, count)
        held.started = True
        self.tokens += count
        metrics.TOKENS.inc(count)
        attempt_id, now = held.assignment.attempt.attempt_id, time.monotonic()
        self._owing_since = now
        if attempt_id not in self._outbox:
            return
        due = self._outbox.due
        self._outbox.append(attempt_id, tokens, now)
        if held.generation.finish is not None:
            self._outbox.finish(attempt_id, held.generation.finish, now)
            self.pressure.set()
        if self._outbox.due < due:
            self.due.set()
        if self._outbox.behind:
            self.pressure.set()

    def _ended(self, held: LocalAttempt, task: asyncio.Task[None]) -> None:
        """Runs outside the task: a task that is cancelled before its first step runs no code."""
        held.task = None
        self.reading.abandon(held.assignment.attempt.attempt_id)
        if self._ledger and held.assignment.attempt.attempt_id not in self._held:
            self._ledger.end(held.entry)
        if self._busy_since and not self.running:
            self._busy_s, self._busy_since = self.busy_s, 0.0
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)
            held.releasing = held.releasing or ReleaseReason(EndCause.FAILED, "the worker failed")
        if held.generation.finish is not None:
            held.releasing = None  # it ended first
        elif held.releasing:
            self.flush()
        self._release_stored()
        self.ended.set()

    def flush(self) -> None:
        """Send all tokens made so far now."""
        self._outbox.flush(time.monotonic())
        self.due.set()

    def _owe(self) -> None:
        self.reading.disturb()
        self._owing_since = time.monotonic()

    def _release_stored(self) -> None:
        """Hand back releasing attempts whose tokens are all stored."""
        ready: dict[ReleaseReason, list[AttemptRef]] = {}
        for attempt_id, held in self._held.items():
            if held.releasing and held.task is None and self._outbox.stored_whole(attempt_id):
                ready.setdefault(held.releasing, []).append(held.assignment.attempt)
        for why, refs in ready.items():
            self._release(refs, why)
            self.drop(refs, "released")


class PromptReading:
    """Counts what the engine reads of prompts, and how long that takes: the coordinator learns its prefill from this.

    A read lasts from the arrival of a request, or from the first token of another one that was read meanwhile, to the
    next first token. That is as if the engine read one prompt at a time, in the order of arrival. It is an
    approximation for engines that read parts of several prompts in a step, decode in the same steps, and let requests
    wait for a slot or for memory. Sums over many reads are right while the engine always reads if it has something to
    read; what it does besides, and what it waits for, makes reading look slower.

    A span in which generation was held, or a request was abandoned, counts as if it had not been. So does a span in
    which a prompt was being scored: its logprobs take much longer than its reading.

    Invariant: `_unread` has the requests in the engine without a token, `_scored` those of them whose prompts are
    scored, and `_since` is when the present span began. The counts grow with the process, and are lost with it.
    """

    def __init__(self) -> None:
        self.reads = self.tokens = 0  # `tokens`: without those found in the cache
        self.seconds = 0.0
        self._unread: set[str] = set()
        self._scored: set[str] = set()
        self._since = 0.0
        self._spoilt = False

    def begin(self, attempt_id: str, now: float, *, scored: bool = False) -> None:
        """A request goes to the engine. `scored`: with logprobs of its prompt."""
        if not self._unread:
            self._since, self._spoilt = now, False
        self._unread.add(attempt_id)
        if scored:
            self._scored.add(attempt_id)
            self._spoilt = True

    def first_token(self, attempt_id: str, tokens: int, cached: int, now: float) -> None:
        """The engine has read a request of so many `tokens`, of which it had `cached`."""
        if attempt_id not in self._unread:
            return
        self._unread.discard(attempt_id)
        self._scored.discard(attempt_id)
        metrics.PROMPT_TOKENS.labels("read").inc(tokens - cached)
        metrics.PROMPT_TOKENS.labels("cached").inc(cached)
        if not self._spoilt:
            lasted_s = now - self._since
            self.reads += lasted_s >= _STEP_S or not self.reads
            self.tokens += tokens - cached
            self.seconds += lasted_s
        self._since, self._spoilt = now, bool(self._scored)

    def abandon(self, attempt_id: str) -> None:
        """A request leaves the engine; nothing changes if it has a token."""
        if attempt_id in self._unread:
            self._unread.discard(attempt_id)
            self._scored.discard(attempt_id)
            self._spoilt = True

    def disturb(self) -> None:
        """Generation is held, or goes on."""
        self._spoilt = True
