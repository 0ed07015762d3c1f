"""Defines `Engine`, all that the worker knows of what generates tokens. vLLM implements it, as others may."""

from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from msgspec import Struct

from ebbtide.errors import Internal
from ebbtide.types.fleet import DraftingState, EngineInfo
from ebbtide.types.rollout import FinishReason
from ebbtide.types.tokens import ScoreArray
from ebbtide.types.weights import Box

#: Of each tensor, by its name.
Shapes = Mapping[str, tuple[int, ...]]
#: The slices that are read of each tensor, by its name; none: it is not read.
Boxes = Mapping[str, tuple[Box, ...]]


class EngineFailed(Internal):
    """The engine can no longer be trusted to serve one whole version: the worker leaves the fleet."""


class DraftSource(Struct, frozen=True, kw_only=True):
    """Whose tokens a request's next ones may be guessed from: its group's, of which it is a member."""

    group: str
    rollout_id: str
    made: int  # how many of the request's tokens are the rollout's response so far: the last ones


class EngineRequest(Struct, frozen=True, kw_only=True):
    """One generation: `token_ids` are prompt and partial; bounds count tokens still to come.

    `stop_token_ids` includes the end-of-sequence tokens, unless the rollout ignores them. A stop token is generated,
    with its logprob, and ends the request with `STOP`. Without `logprobs`, NaN stands for each.

    With `prompt_logprobs` the prompt is scored, too, which is then read whole: the only delta has its scores, and one
    version makes all of them.
    """

    request_id: str
    token_ids: Sequence[int]
    temperature: float
    top_p: float
    top_k: int
    max_tokens: int
    min_tokens: int
    stop_token_ids: Sequence[int]
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    logprobs: bool = True
    priority: int = 0
    prompt_logprobs: int | None = None  # alternatives of each score; None: the prompt is not scored
    cache_name: str = ""  # by which `Engine.forget` may name its text; empty: it is never named
    drafts: DraftSource | None = None  # an engine that speculates may draft from it; None: nothing is drafted
    stream_interval: int = (
        1  # tokens behind the first that it may hold back until it has so many; the end comes at once
    )


class TokenDelta(NamedTuple):
    """Tokens as they leave the engine: ids, logprobs in nats and versions of equal length; `finish` with the last.

    `scores`: of the prompt and of the one token behind it, as `PromptScores.places`.
    `cached`: with a request's first tokens, how many of `EngineRequest.token_ids` the engine had keys and values of.
    """

    ids: Sequence[int]
    logprobs: Sequence[float]
    versions: Sequence[int]
    finish: FinishReason | None = None
    scores: ScoreArray | None = None
    cached: int = 0


class EngineCapacity(Struct, frozen=True, kw_only=True):
    """What an engine holds and schedules at most."""

    kv_tokens: int
    kv_block: int
    batched_tokens: int  # of a step
    sequences: int  # that run at once
    prefix_cache: bool
    whole_prompt_fits: bool  # a sequence starts only if all tokens that it has fit


class Engine(Protocol):
    """One engine. It serves whole versions only; version 0 is the checkpoint that it booted from."""

    async def start(self, *, aside: bool = False) -> EngineInfo:
        """Boot. Called once, first, from the main thread. Raises `InvalidRequest` for a model it cannot serve.

        `aside`: the process has served already, and must not block meanwhile.
        """
        ...

    @property
    def shapes(self) -> Shapes:
        """Names and shapes of the tensors that a version must consist of; empty: any."""
        ...

    @property
    def boxes(self) -> Boxes | None:
        """The slices of a version's tensors that this engine reads, over all its ranks; None: everything.

        Known after the start. Installed files need not be filled outside them.
        """
        ...

    @property
    def scores_prompts(self) -> bool:
        """Whether it serves requests with `prompt_logprobs`. It never changes."""
        ...

    @property
    def preemptions(self) -> int:
        """How often it took a running request's memory for keys and values by itself, since its start."""
        ...

    @property
    def speculates(self) -> bool:
        """Whether it drafts tokens from the groups of requests. It never changes."""
        ...

    @property
    def drafting(self) -> DraftingState | None:
        """What drafts came to, as last reported; None without a report."""
        ...

    def generate(self, request: EngineRequest) -> AsyncGenerator[TokenDelta, None]:
        """Generate until a delta has a finish. Closing the generator aborts the request.

        Raises `InvalidRequest` or `Internal` if this request cannot be served, `EngineFailed` if none can.
        """
        ...

    def deliver(self, request_id: str | None = None) -> None:
        """Let `generate` give the tokens that are held back (`EngineRequest.stream_interval`) to readers that wait:
        they have them after one round of the event loop. `request_id`: those of one request, and hold back none of it
        later.

        Unknown names are ignored.
        """
        ...

    def forget(self, names: Sequence[str]) -> None:
        """Have what is cached of these texts make room first: no request will begin with them.

        Returns at once. Unknown names are ignored, and all of them by an engine without such a choice.
        """
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of `token_ids`, special tokens included."""
        ...

    async def install(self, version: int, weights: Path, changes: Path | None = None) -> float:
        """Replace the weights. Requests go on under the new version; those without a token start again.

        `weights`: a safetensors file of all tensors of the version. `changes`: the same for the change from the
        installed version, for engines that apply it in place. It has, for each changed tensor NAME, the tensors
        `NAME.indices` (i64, one dimension, ascending positions in the flat tensor) and `NAME.values` (its data type).
        Neither file is read or mapped after the return.

        Returns the seconds for which generation stood still. Raises `InvalidRequest` if the old version is still whole
        and serving, `EngineFailed` if it may not be.
        """
        ...

    async def pause(self, reason: str) -> None:
        """Hold all requests, keeping their state, until every reason to pause is resumed."""
        ...

    async def resume(self, reason: str) -> None: ...

    def check(self) -> None:
        """Raises `EngineFailed` if the engine is gone."""
        ...

    async def stop(self) -> None: ...
