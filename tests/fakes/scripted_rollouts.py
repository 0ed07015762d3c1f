"""A run whose rollouts are written by the test: what a gateway serves clients from, without a coordinator."""

import asyncio
import threading
from collections.abc import AsyncGenerator, Iterator, Sequence
from typing import Any

import msgspec

from ebbtide.errors import AlreadyExists, EbbtideError, NotFound
from ebbtide.gateway.model import ServedModel
from ebbtide.gateway.parsers import OutputDelta, OutputParser, OutputParsers, ToolCallDelta, call_id
from ebbtide.gateway.templates import TemplateSandbox
from ebbtide.types.rollout import FinishReason, RolloutRequest, TokenChunk
from ebbtide.types.run import EnvironmentSpec, Run, RunShare, RunSpec, RunStatus
from ebbtide.types.session import KeyUsage, MeteredKey, Session, SessionEnd
from ebbtide.types.tokens import TOKEN_BYTES, ScoreArray, pack_scores, pack_tokens, unpack_ids
from ebbtide.types.weights import PolicyVersion
from tests.fakes.model_texts import CHATML, byte_level_tokenizer, served_model
from tests.fakes.scripted_engine import script_scores
from tests.fakes.scripted_sessions import ScriptedSessions
from tests.fakes.scripted_settings import ScriptedSettings

#: Tokens of one chunk.
CHUNK = 3


#: The prompt of each turn begins with that of the turn before and its answer, reasoning and calls included.
KEEPS_HISTORY = (
    "{% if tools %}tools: {{ tools | length }}\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning %}<think>{{ m.reasoning }}</think>{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def scripted_model(
    sandbox: TemplateSandbox, *, tools: bool = False, context: int = 512, template: str = CHATML
) -> ServedModel:
    parsers = MarkedOutputs() if tools else None
    return served_model(byte_level_tokenizer(), sandbox, template=template, context=context, parsers=parsers)


def scripted_run(run_id: str = "spell-1", *, name: str = "spell", version: int = 3, model: str = "/models/m") -> Run:
    spec = RunSpec(name=name, model=model, environment=EnvironmentSpec(name="number_guessing"))
    newest = PolicyVersion(policy="policy", version=version, parent=0, step=0, root=b"r" * 32) if version else None
    return Run(run_id=run_id, spec=spec, status=RunStatus.RUNNING, newest=newest, share=RunShare(workers=2))


class ScriptedSource(ScriptedSessions):
    """Answers each rollout with a text of `answers`, or of `answer` when these are used up."""

    def __init__(self, run: Run, model: ServedModel, answer: str = "Hello world") -> None:
        super().__init__(run)
        self.model, self.answer = model, answer
        self.answers: list[str] = []
        self.submitted: dict[str, RolloutRequest] = {}
        self.cancelled: list[str] = []
        self.reasons: dict[str, str] = {}  # of what was cancelled
        self.released = False
        self.lost = asyncio.Event()
        self.refusal: EbbtideError | None = None
        self.metered: list[MeteredKey] = []  # of submits and turns with one
        self.used: dict[str, int] = {}  # tokens by owner
        self.gate = asyncio.Event()  # chunks behind the first wait for it
        self.gate.set()
        self.first = asyncio.Event()  # the first chunk was taken
        self.asked = asyncio.Event()  # a submit has come
        self.acknowledges = asyncio.Event()  # submits are answered
        self.acknowledges.set()
        self.break_off: FinishReason | None = None  # how each rollout ends behind its first chunk
        self.newer: Run | None = None  # what `refreshed` finds
        self.chunk = CHUNK
        self.scores_prompts = True  # as coordinators and workers of this release do
        self._texts: dict[str, str] = {}

    async def refreshed(self) -> Run:
        self.run = self.newer or self.run
        return self.run

    async def key_usage(self, owner: str) -> KeyUsage:
        return KeyUsage(owner=owner, tokens=self.used.get(owner, 0))

    async def submit_rollouts(
        self, rollouts: Sequence[RolloutRequest], *, wait: bool, key: MeteredKey | None = None
    ) -> None:
        assert not wait, "a client is told when to come back"
        if key is not None:
            self.metered.append(key)
        if self.refusal is not None:
            raise self.refusal
        for rollout in rollouts:
            if self.submitted.setdefault(rollout.rollout_id, rollout) != rollout:
                raise AlreadyExists(f"rollout {rollout.rollout_id} is another one")
            if rollout.rollout_id not in self._texts:
                self._texts[rollout.rollout_id] = self.answers.pop(0) if self.answers else self.answer
        self.asked.set()
        await self.acknowledges.wait()

    async def tokens(self, rollout_id: str) -> AsyncGenerator[TokenChunk, None]:
        if rollout_id not in self.submitted:
            raise NotFound(f"rollout {rollout_id} is not here")
        chunks = list(self._chunks(rollout_id))
        for place, chunk in enumerate(chunks):
            if place:
                await self.gate.wait()
                if rollout_id in self.cancelled:
                    why = self.reasons.get(rollout_id, "")
                    yield TokenChunk(offset=chunk.offset, tokens=b"", reason=FinishReason.CANCELLED, message=why)
                    return
                if self.break_off is not None:
                    yield TokenChunk(offset=chunk.offset, tokens=b"", reason=self.break_off, message="evidence")
                    return
            yield chunk
            self.first.set()

    async def cancel_rollouts(self, rollout_ids: Sequence[str], reason: str = "") -> None:
        self.cancelled += rollout_ids
        self.reasons |= dict.fromkeys(rollout_ids, reason)

    async def end_session(self, how: SessionEnd) -> Session:
        session = await super().end_session(how)
        for turn in self.stored[how.session_id][1]:
            for rollout_id in turn.rollout_ids:
                self.submitted.pop(rollout_id, None)
        return session

    async def release(self) -> None:
        self.released = True

    def ids(self, rollout_id: str) -> tuple[list[int], FinishReason]:
        """The whole response."""
        sampling = self.submitted[rollout_id].sampling
        ids = self.model.encode(self._texts[rollout_id], special=False)
        ids += [] if sampling.ignore_eos else [self.model.eos_ids[0]]
        for place, token in enumerate(ids):
            ends = token in sampling.stop_token_ids or (token in self.model.eos_ids and not sampling.ignore_eos)
            if ends and place < sampling.max_tokens:
                return ids[: place + 1], FinishReason.STOP
        return ids[: sampling.max_tokens], FinishReason.LENGTH

    def scores(self, rollout_id: str) -> ScoreArray:
        """The scores of a rollout's prompt, and of the token behind it."""
        rollout = self.submitted[rollout_id]
        ids = [*unpack_ids(rollout.prompt_ids).tolist(), *self.ids(rollout_id)[0]]
        return script_scores(ScriptedSettings(vocab_size=self.model.vocabulary), ids, rollout.prompt_logprobs or 0)

    def _chunks(self, rollout_id: str) -> Iterator[TokenChunk]:
        ids, reason = self.ids(rollout_id)
        assert self.run.newest is not None
        if self.submitted[rollout_id].prompt_logprobs is not None and self.scores_prompts:
            token = pack_tokens(ids, [-0.25], self.run.newest.version)
            tokens = pack_scores(self.scores(rollout_id), token)
            for at in range(0, len(tokens), self.chunk * TOKEN_BYTES):
                some = tokens[at : at + self.chunk * TOKEN_BYTES]
                last = at + len(some) == len(tokens)
                yield TokenChunk(offset=at // TOKEN_BYTES, tokens=some, reason=reason if last else None)
            return
        logprobs = [-0.25 * (1 + place % 4) for place in range(len(ids))]
        for offset in range(0, len(ids), self.chunk):
            last = offset + self.chunk >= len(ids)
            part = slice(offset, offset + self.chunk)
            tokens = pack_tokens(ids[part], logprobs[part], self.run.newest.version)
            yield TokenChunk(offset=offset, tokens=tokens, reason=reason if last else None)


class ScriptedCatalog:
    """Runs by their ids, each with a source."""

    def __init__(self, sources: Sequence[ScriptedSource]) -> None:
        self.sources = {source.run.run_id: source for source in sources}
        self.reads = 0
        self.opened: list[str] = []
        self.away: EbbtideError | None = None
        self.held: asyncio.Event | None = None
        """The next read's answer waits for it."""

    async def runs(self) -> list[Run]:
        self.reads += 1
        if self.away is not None:
            raise self.away
        runs, held, self.held = [source.run for source in self.sources.values()], self.held, None
        if held is not None:
            await held.wait()
        return runs

    async def open(self, run: Run) -> ScriptedSource:
        await asyncio.sleep(0)
        self.opened.append(run.run_id)
        source = self.sources[run.run_id]
        source.lost.clear()
        source.released = False
        return source

    async def context(self, run: Run) -> int:
        return self.sources[run.run_id].model.context

    async def model(self, run: Run) -> ServedModel:
        return self.sources[run.run_id].model


class MarkedOutputs(OutputParsers):
    """Finds `<think>...</think>` and `<tool_call>{"name": ..., "arguments": ...}</tool_call>`."""

    def __init__(self) -> None:
        self.made: list[str] = []  # the seeds of all parsers
        self.threads: set[threading.Thread] = set()  # that made parsers, or had them parse whole texts

    def parser(self, *, tools: Any, tool_choice: str, call_seed: str, **_: Any) -> OutputParser:
        self.made.append(call_seed)
        self.threads.add(threading.current_thread())
        return _MarkedOutput(call_seed, self.threads, calls=bool(tools) and tool_choice == "auto")


class _MarkedOutput(OutputParser):
    skip_special = False

    def __init__(self, seed: str, threads: set[threading.Thread], *, calls: bool) -> None:
        self._seed, self._threads, self._with_calls, self._text = seed, threads, calls, ""

    def push(self, text: str, ids: Sequence[int]) -> OutputDelta:
        self._text += text
        return OutputDelta()

    def end(self) -> OutputDelta:
        return self._marked(self._text)

    def whole(self, text: str, ids: Sequence[int]) -> OutputDelta:
        self._threads.add(threading.current_thread())
        return self._marked(text)

    def _marked(self, text: str) -> OutputDelta:
        reasoning, _, rest = text.partition("</think>") if "</think>" in text else ("", "", text)
        content, *marked = rest.split("<tool_call>") if self._with_calls else [rest]
        found = [msgspec.json.decode(one.partition("</tool_call>")[0]) for one in marked]
        calls = [
            ToolCallDelta(
                index=index,
                call_id=call_id(self._seed, index),
                name=call["name"],
                arguments=msgspec.json.encode(call["arguments"]).decode(),
            )
            for index, call in enumerate(found)
        ]
        reasoning = reasoning.removeprefix("<think>")
        return OutputDelta(reasoning=reasoning, content=content, tool_calls=tuple(calls))
