"""Generates by a script, for tests, chaos and scale: each token is a pure function of all tokens before it, so that a
resume must continue exactly, whichever worker generated the partial. Weights change only the version.

Invariant: one timer makes the tokens of all requests, a step at a time, while there are requests; a paused, stalled or
lost engine makes none. `tokens` counts them. If `digests` is set, `installed` holds a digest of each version's bytes,
which a real engine would have copied.
"""

import asyncio
import hashlib
import math
import os
import time
import zlib
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Final

from msgspec.structs import replace

from ebbtide import telemetry
from ebbtide.errors import InvalidRequest
from ebbtide.grants import Page
from ebbtide.rollout_worker.engine import Boxes, EngineFailed, EngineRequest, Shapes, TokenDelta, checkpoint_facts
from ebbtide.rollout_worker.settings import WorkerSettings
from ebbtide.types.fleet import DraftingState, EngineInfo
from ebbtide.types.rollout import FinishReason
from ebbtide.types.tokens import ScoreArray, pack_ids, score_places
from tests.fakes.scripted_memory import ScriptedMemory
from tests.fakes.scripted_settings import ScriptedSettings, read_script

log = telemetry.get_logger(__name__)

#: The token that ends a response.
END: Final = 1
#: The lowest generated id besides END: tests may use the ids below.
_FIRST: Final = 2
#: Interval of looks of a borrowed engine without a budget or a request.
_LISTEN_S: Final = 0.02
#: The longest single sleep.
_LONG_S: Final = 3600.0


def make(settings: WorkerSettings, model: Path | None, page: Page | None) -> "ScriptedEngine":
    """The factory by which a worker has it."""
    script = read_script(settings.engine_options)
    return ScriptedEngine(script if model is None else replace(script, model=str(model)), page)


def digest(weights: Path) -> str:
    """BLAKE2b of the file, in hexadecimal."""
    with weights.open("rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()


class TokenScript:
    """Continues a sequence of tokens."""

    def __init__(self, settings: ScriptedSettings, token_ids: Sequence[int]) -> None:
        self._settings = settings
        self._state = zlib.crc32(pack_ids(token_ids))

    def next(self) -> tuple[int, float]:
        """The next token and its logprob."""
        state, mean = self._state, self._settings.mean_length
        ends = mean > 0 and (state >> 8) % mean == 0
        token = END if ends else _FIRST + state % (self._settings.vocab_size - _FIRST)
        self._state = zlib.crc32(token.to_bytes(4, "little"), state)
        return token, -(state % 1024) / 1024


def follow(settings: ScriptedSettings, token_ids: Sequence[int], count: int) -> list[tuple[int, float]]:
    """The `count` tokens and logprobs that follow `token_ids`, past any end."""
    script = TokenScript(settings, token_ids)
    return [script.next() for _ in range(count)]


def script_scores(settings: ScriptedSettings, token_ids: Sequence[int], alternatives: int) -> ScoreArray:
    """The scores of all tokens behind the first, shape (n, 1 + alternatives): at each place the script ranks the
    vocabulary by the tokens before it.
    """
    places, state = list[tuple[int, float, int]](), zlib.crc32(pack_ids(token_ids[:1]))
    for token in token_ids[1:]:
        first = state % settings.vocab_size
        ranks = [(token - first) % settings.vocab_size + 1, *range(1, alternatives + 1)]
        places += [((first + rank - 1) % settings.vocab_size, -rank / 64, rank) for rank in ranks]
        state = zlib.crc32(token.to_bytes(4, "little"), state)
    ids, logprobs, ranked = zip(*places, strict=True)
    return score_places(ids, logprobs, ranked, alternatives)


class TokenFeed:
    """One request, and its tokens that the reader has not taken yet."""

    def __init__(self, settings: ScriptedSettings, request: EngineRequest, ready: float) -> None:
        """`ready`: when its first token may be made."""
        self._settings, self._request, self.ready = settings, request, ready
        self._script = TokenScript(settings, request.token_ids)
        self._made = 0
        self._ids, self._logprobs, self._versions = list[int](), list[float](), list[int]()
        self._finish: FinishReason | None = None
        self._scores: ScoreArray | None = None
        self._news = asyncio.Event()

    @property
    def context(self) -> int:
        return len(self._request.token_ids) + self._made

    @property
    def unread(self) -> int:
        """Tokens to read before the first one is made."""
        return 0 if self._made else len(self._request.token_ids)

    def make(self, version: int) -> bool:
        """Make one token. Returns whether it is the last."""
        token, logprob = self._script.next()
        self._made += 1
        if token in self._request.stop_token_ids and self._made > self._request.min_tokens:
            self._finish = FinishReason.STOP
        elif self._made == self._request.max_tokens:
            self._finish = FinishReason.LENGTH
        if (alternatives := self._request.prompt_logprobs) is not None:
            self._scores = script_scores(self._settings, [*self._request.token_ids, token], alternatives)
        self._ids.append(token)
        self._logprobs.append(logprob if self._request.logprobs else math.nan)
        self._versions.append(version)
        return self._finish is not None

    def tell(self) -> None:
        self._news.set()

    async def take(self) -> TokenDelta:
        """The new tokens; waits for some."""
        await self._news.wait()
        self._news.clear()
        delta = TokenDelta(self._ids, self._logprobs, self._versions, self._finish, self._scores)
        self._ids, self._logprobs, self._versions = [], [], []
        return delta


class ScriptedEngine:
    """Implements `Engine`; see there."""

    def __init__(self, settings: ScriptedSettings, page: Page | None = None) -> None:
        """`page`: of grants, for an engine that computes only as a guard allows."""
        self._page = page
        self._settings = settings
        self._version = self.tokens = 0
        self._shapes: Shapes = {}
        self.digests = settings.digests
        self.installed: list[tuple[int, str]] = []
        self._feeds: dict[TokenFeed, None] = {}
        self._memory = ScriptedMemory[TokenFeed](settings.kv_tokens, settings.kv_block)
        self._steps: asyncio.Task[None] | None = None
        self._paused: set[str] = set()
        self._going = asyncio.Event()
        self._going.set()
        self._lost = False
        self._stalls = (math.inf, math.inf)  # begin and end

    @property
    def shapes(self) -> Shapes:
        return self._shapes

    @property
    def boxes(self) -> Boxes | None:
        return None

    @property
    def install_s(self) -> float:
        return self._settings.install_s

    @property
    def scores_prompts(self) -> bool:
        return self._settings.scores

    @property
    def preemptions(self) -> int:
        return self._memory.preemptions

    @property
    def speculates(self) -> bool:
        return False

    @property
    def drafting(self) -> DraftingState | None:
        return None

    async def start(self, *, aside: bool = False) -> EngineInfo:
        if self._settings.model:
            self._shapes = checkpoint_facts.tensor_shapes(checkpoint_facts.check_directory(self._settings.model))
        await asyncio.sleep(self._settings.boot_s)
        if self._page is not None:
            self._page.enter(os.getpid(), 0)
        if self._settings.stall_at_s:
            begin = time.monotonic() + self._settings.stall_at_s
            self._stalls = (begin, begin + (self._settings.stall_s or math.inf))
        return EngineInfo(
            model=Path(self._settings.model).name or "scripted",
            vocab_size=self._settings.vocab_size,
            max_model_len=self._settings.max_model_len,
            eos_token_ids=(END,),
            architecture=checkpoint_facts.architecture(self._shapes) if self._shapes else "scripted",
            kv_tokens=self._settings.kv_tokens,
            kv_block=self._settings.kv_block if self._settings.kv_tokens else 0,
        )

    async def generate(self, request: EngineRequest) -> AsyncGenerator[TokenDelta, None]:
        self.check()
        if request.prompt_logprobs is not None and not self.scores_prompts:
            raise InvalidRequest("this script does not score prompts", field="prompt_logprobs")
        ready = time.monotonic() + self._settings.first_token_s * self._settings.slowness
        feed = TokenFeed(self._settings, request, ready)
        self._feeds[feed] = None
        if self._steps is None or self._steps.done():
            self._steps = asyncio.create_task(self._run(), name="scripted engine")
        try:
            while True:
                delta = await feed.take()
                if not delta.ids:
                    self.check()
                    continue
                yield delta
                if delta.finish is not None:
                    return
        finally:
            self._feeds.pop(feed, None)

    def deliver(self, request_id: str | None = None) -> None:
        """It holds nothing back."""

    def forget(self, names: Sequence[str]) -> None:
        """It caches nothing."""

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(chr(token) for token in token_ids)

    async def install(self, version: int, weights: Path, changes: Path | None = None) -> float:
        if version == self._settings.refuse_version:
            raise InvalidRequest(f"version {version} was refused, as scripted", field="weights")
        for file in [weights] if changes is None else [weights, changes]:
            checkpoint_facts.header(file)
        start = time.monotonic()
        await self.pause("install")
        await asyncio.sleep(self.install_s)
        if self.digests:
            self.installed.append((version, await asyncio.to_thread(digest, weights)))
            log.info("weights read", version=version, digest=self.installed[-1][1])
        self._version = version
        await self.resume("install")
        return time.monotonic() - start

    async def pause(self, reason: str) -> None:
        self._paused.add(reason)
        self._going.clear()

    async def resume(self, reason: str) -> None:
        self._paused.discard(reason)
        if not self._paused:
            self._going.set()

    def check(self) -> None:
        if self._lost:
            raise EngineFailed("lost, as scripted")

    async def stop(self) -> None:
        if self._steps is not None:
            self._steps.cancel()
            await asyncio.wait({self._steps})

    async def _run(self) -> None:
        """Step until there are no requests. Late steps are not made up for."""
        due = time.monotonic()
        while self._feeds:
            if self._page is not None:
                await self._borrowed_step(self._page)
                continue
            now = time.monotonic()
            ready = self._memory.fit([feed for feed in self._feeds if feed.ready <= now])
            due = max(due + self._step_s(ready), now) if ready else min(feed.ready for feed in self._feeds)
            await asyncio.sleep(min(due - now, _LONG_S))
            await self._free()
            self._step([feed for feed in ready if feed in self._feeds])

    async def _borrowed_step(self, page: Page) -> None:
        """Make one step within the page's budget. Requests without room in it go first in the next."""
        await self._free()
        stubborn = self._settings.stubborn
        if not stubborn and not page.budget().tokens:
            await asyncio.to_thread(page.await_budget, _LISTEN_S)
        now = time.monotonic()
        ready = [feed for feed in self._feeds if feed.ready <= now]
        if not ready:
            await asyncio.sleep(_LISTEN_S)
            return
        budget = page.begin_step(heeding=not stubborn)
        some = ready if stubborn else ready[: min(budget.tokens, budget.sequences)]
        try:
            if some:
                await asyncio.sleep(self._step_s(some))
            if not self._going.is_set():
                some = []  # paused meanwhile: the step does not count
            some = [feed for feed in some if feed in self._feeds]
            for feed in some:
                self._feeds[feed] = self._feeds.pop(feed)
            self._step(some)
        finally:
            page.end_step(len(some))
            page.report(running=len(self._feeds), waiting=0, kv_used=0, recomputed=0)

    def _step_s(self, ready: Sequence[TokenFeed]) -> float:
        """Seconds for the next tokens of these requests, with the reading of new ones."""
        settings = self._settings
        crowd = max(1.0, len(ready) / settings.plateau) if settings.plateau else 1.0
        reading = settings.prefill_token_s * sum(feed.unread for feed in ready)
        return settings.slowness * (settings.step_s * settings.burst * crowd + reading)

    async def _free(self) -> None:
        """Wait until the engine is neither paused nor stalled."""
        while True:
            await self._going.wait()
            now = time.monotonic()
            if 0 < self._settings.stall_after_tokens <= self.tokens:
                await asyncio.Event().wait()
            elif self._stalls[0] <= now < self._stalls[1]:
                await asyncio.sleep(min(self._stalls[1] - now, _LONG_S))
            else:
                return

    def _step(self, feeds: Sequence[TokenFeed]) -> None:
        for feed in feeds:
            for _ in range(self._settings.burst):
                if 0 < self._settings.fail_after_tokens <= self.tokens:
                    self._lost = True
                if self._lost or 0 < self._settings.stall_after_tokens <= self.tokens:
                    break
                self.tokens += 1
                if feed.make(self._version):
                    self._feeds.pop(feed, None)
                    break
            feed.tell()
        if self._lost:
            for feed in self._feeds:
                feed.tell()
