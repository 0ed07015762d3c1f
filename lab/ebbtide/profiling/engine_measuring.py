"""Measures an engine, booted as by a worker: steps of many sizes, stops, and installs, by real requests.

A measured block keeps some sequences decoding and watches one of them, which makes a token in each step. Then prompts
are read beside them, one after another. Rounds of all blocks follow each other in changing order, so that what else the
machine does falls on all of them alike.
"""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Final, NamedTuple

from msgspec import Struct

from ebbtide.errors import InvalidRequest
from ebbtide.rollout_worker.engine import Engine, EngineCapacity, EngineFailed, EngineRequest
from ebbtide.rollout_worker.engine.checkpoint_facts import check_directory, weights_bytes
from ebbtide.rollout_worker.engine.vllm.cpu_build import is_cpu_build
from ebbtide.rollout_worker.settings import WorkerSettings
from ebbtide.types.fleet import EngineInfo

if TYPE_CHECKING:
    from ebbtide.rollout_worker.engine.vllm.vllm_engine import VllmEngine

#: Steps of a decoding interval: at some milliseconds a step they outlast the jitter of single ones.
_STEPS: Final = 48
#: Prompts read beside each block, as parts of the longest.
_READS: Final = (1.0, 0.5, 0.25)
#: Steps between the end of such a reading and the end of its interval.
_AFTER: Final = 3
#: Tokens of the shorter of the two contexts.
_SHORT: Final = 16
#: Share of the memory for keys and values that a block may fill, so that none is preempted.
_FILL: Final = 0.9
_PAUSE: Final = "profile"
#: The number of the version that is installed after the weights were given up; rounds count from 1 on.
_AFTER_SLEEP: Final = 1 << 30


class StepGroup(Struct, frozen=True, kw_only=True):
    """Like steps. `batch` sequences decode in each, with `context` tokens over all of them on average; `prefill` tokens
    are read in each, which attend to `pairs` tokens over all of them; `prompts` sequences begin to be read in each."""

    steps: int
    batch: int
    context: float = 0.0
    prefill: int = 0
    pairs: int = 0
    prompts: int = 0


class MeasuredSteps(Struct, frozen=True, kw_only=True):
    """Steps that followed each other, and the seconds of all of them."""

    seconds: float
    groups: tuple[StepGroup, ...]

    @property
    def steps(self) -> int:
        return sum(group.steps for group in self.groups)


class EngineMeasurements(Struct, frozen=True, kw_only=True):
    """One engine, measured."""

    device: str  # name of the GPUs; empty: a CPU
    capacity: EngineCapacity
    steps: tuple[MeasuredSteps, ...]
    start_s: float  # of its process to its first token
    stop_s: tuple[float, ...]  # from the wish to stop to the end of the step under way
    pause_s: tuple[float, ...]  # generation stood still for an install of all weights
    sleep_s: float = 0.0  # it gave up its weights' memory; 0: not measured
    wake_s: float = 0.0  # it had them back
    weights_bytes: int = 0  # of all devices


class MeasuredBlock(NamedTuple):
    """`batch` sequences with prompts of `prompt` tokens decode; prompts of up to `read` tokens are read beside them."""

    batch: int
    prompt: int
    read: int


def plan_blocks(capacity: EngineCapacity, max_model_len: int) -> list[MeasuredBlock]:
    """One, two, four and so on up to all sequences, each with short and with long contexts, as far as memory allows."""
    batches = [1 << power for power in range(capacity.sequences.bit_length()) if 1 << power < capacity.sequences]
    blocks: dict[MeasuredBlock, None] = {}
    for batch in [*batches, capacity.sequences]:
        for wanted in (_SHORT, max_model_len):
            read = max(1, max_model_len - 1)
            room = int(_FILL * capacity.kv_tokens) - read
            # A block's own length depends on its prompt, because prompts take steps to be read.
            prompt = min(wanted, max_model_len, room // batch)
            while prompt > 0 and prompt + _length(batch, prompt, read, capacity) > min(max_model_len, room // batch):
                prompt -= max(1, prompt // 8)
            if prompt > 0:
                blocks[MeasuredBlock(batch, prompt, read)] = None
    return list(blocks)


def _length(batch: int, prompt: int, read: int, capacity: EngineCapacity) -> int:
    """Tokens that each sequence of a block makes: as many as its steps, in which all prompts are read, too."""
    room = max(1, capacity.batched_tokens - batch)
    reading = -(-batch * prompt // room) + sum(-(-round(read * part) // room) + 4 * _AFTER for part in _READS)
    return _STEPS + reading + batch // 4 + 16


class EngineMeasuring:
    """Measures `engine`, which serves nobody else. `tell` hears the progress."""

    def __init__(
        self, engine: Engine, info: EngineInfo, capacity: EngineCapacity, tell: Callable[[str], None], *, seed: int = 0
    ) -> None:
        self._engine, self._info, self._capacity, self._tell = engine, info, capacity, tell
        self._seed = seed
        self._draw = Random(f"{seed} prompts")
        self._requests = 0
        self.steps: list[MeasuredSteps] = []
        self.stops: list[float] = []  # seconds from a wish to stop to its effect
        self.pauses: list[float] = []  # seconds for which an install held generation

    async def run(self, *, seconds: float, weights: Path | None) -> None:
        """Measures for so many seconds at most, from now on. `weights`: a file of all tensors, to be installed after
        each round. Raises `EngineFailed` if the engine fails."""
        blocks, clock = plan_blocks(self._capacity, self._info.max_model_len), asyncio.get_running_loop().time
        end, round_number = clock() + seconds, 0
        while clock() < end and blocks:
            round_number += 1
            for block in Random(f"{self._seed} round {round_number}").sample(blocks, len(blocks)):
                if clock() >= end:
                    break
                await self._block(block)
                done = f"round {round_number}, {max(0.0, end - clock()):.0f} s left"
                self._tell(f"{done}: {block.batch} sequences of {block.prompt} tokens, {self._last_ms:.2f} ms a step")
            if weights is not None:
                self.pauses.append(await self._engine.install(round_number, weights))

    @property
    def _last_ms(self) -> float:
        last = next((one for one in reversed(self.steps) if len(one.groups) == 1), None)
        return 1e3 * last.seconds / last.steps if last else 0.0

    async def _block(self, block: MeasuredBlock) -> None:
        length = _length(*block, self._capacity)
        streams = [_Stream(self._engine, self._request(block.prompt, length)) for _ in range(block.batch)]
        try:
            for stream in streams:
                await stream.reaches(1)
            watched = streams[-1]
            await self._decode(block, streams, watched)
            for part in _READS:
                await self._read(block, streams, watched, max(1, round(block.read * part)))
            await self._stop()
        finally:
            for stream in streams:
                await stream.close()

    async def _decode(self, block: MeasuredBlock, streams: "list[_Stream]", watched: "_Stream") -> None:
        began, made, context = await self._mark(block, streams, watched)
        await watched.reaches(made + _STEPS)
        steps = watched.made - made
        group = StepGroup(steps=steps, batch=block.batch, context=context + block.batch * (steps - 1) / 2)
        self._note(watched.at - began, (group,), streams)

    async def _read(self, block: MeasuredBlock, streams: "list[_Stream]", watched: "_Stream", tokens: int) -> None:
        began, made, context = await self._mark(block, streams, watched)
        reading = _Stream(self._engine, self._request(tokens, 1))
        try:
            await reading.reaches(1)
        finally:
            await reading.close()
        await watched.reaches(watched.made + _AFTER)
        steps = watched.made - made
        context += block.batch * (steps - 1) / 2
        groups, room = [], self._capacity.batched_tokens - block.batch
        for start in range(0, tokens, room):
            part = min(room, tokens - start)
            pairs = part * start + part * (part + 1) // 2
            begun = 1 if start == 0 else 0
            groups.append(
                StepGroup(steps=1, batch=block.batch, context=context, prefill=part, pairs=pairs, prompts=begun)
            )
        if steps > len(groups):
            groups.append(StepGroup(steps=steps - len(groups), batch=block.batch, context=context))
            self._note(watched.at - began, tuple(groups), streams)

    async def _mark(
        self, block: MeasuredBlock, streams: "list[_Stream]", watched: "_Stream"
    ) -> tuple[float, int, float]:
        """The watched sequence's next token: when it came, its number, and the tokens that the next step attends to."""
        await watched.reaches(watched.made + 1)
        return watched.at, watched.made, block.batch * block.prompt + sum(stream.made for stream in streams)

    def _note(self, seconds: float, groups: tuple[StepGroup, ...], streams: "list[_Stream]") -> None:
        """Keeps an interval in which no sequence of the block ended."""
        if seconds > 0.0 and not any(stream.ended for stream in streams):
            self.steps.append(MeasuredSteps(seconds=seconds, groups=groups))

    async def _stop(self) -> None:
        clock = asyncio.get_running_loop().time
        began = clock()
        await self._engine.pause(_PAUSE)
        self.stops.append(clock() - began)
        await self._engine.resume(_PAUSE)

    def _request(self, prompt: int, length: int) -> EngineRequest:
        """Random tokens, which no cache has, and a response of exactly so many."""
        self._requests += 1
        return EngineRequest(
            request_id=f"profile-{self._requests}",
            token_ids=[self._draw.randrange(self._info.vocab_size) for _ in range(prompt)],
            temperature=1.0,
            top_p=1.0,
            top_k=0,
            max_tokens=length,
            min_tokens=length,
            stop_token_ids=(),
        )


class _Stream:
    """One request under way."""

    def __init__(self, engine: Engine, request: EngineRequest) -> None:
        self.made = 0
        self.at = 0.0  # when the last token came
        self.ended = False
        self._came = asyncio.Event()
        self._task = asyncio.create_task(self._consume(engine, request))

    async def reaches(self, tokens: int) -> None:
        """Waits for so many tokens, or for the end. Raises what the engine raised."""
        while self.made < tokens and not self.ended:
            self._came.clear()
            await self._came.wait()
        if self._task.done():
            self._task.result()

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.wait({self._task})
        if not self._task.cancelled() and (error := self._task.exception()):
            raise error

    async def _consume(self, engine: Engine, request: EngineRequest) -> None:
        loop = asyncio.get_running_loop()
        deltas = engine.generate(request)
        try:
            async for delta in deltas:
                self.made += len(delta.ids)
                self.at = loop.time()
                self.ended = delta.finish is not None
                self._came.set()
            if not self.ended:
                raise EngineFailed("a request ended without a finish")
        finally:
            self.ended = True
            self._came.set()
            await deltas.aclose()


def measure_vllm(settings: WorkerSettings, *, seconds: float, tell: Callable[[str], None]) -> EngineMeasurements:
    """Measures the engine of a worker with these settings for so many seconds, its start not counted.

    Raises `InvalidRequest` for a model that it cannot boot, and `EngineFailed` if the engine fails. Called from the
    main thread, before any other one runs: the engine's process may be forked.
    """
    if settings.engine != "vllm":
        raise InvalidRequest("only vllm can be measured", field="engine")
    return asyncio.run(_measure(settings, seconds, tell))


async def _measure(settings: WorkerSettings, seconds: float, tell: Callable[[str], None]) -> EngineMeasurements:
    from ebbtide.rollout_worker.engine.vllm.vllm_engine import VllmEngine
    from ebbtide.rollout_worker.service import with_slots

    root = check_directory(settings.model)
    weights = _one_file(root, tell)
    engine = VllmEngine(settings.model, with_slots(settings).slots, settings.vllm)
    try:
        began = time.monotonic()
        info = await engine.start()
        start_s = time.monotonic() - began
        tell(f"started in {start_s:.1f} s")
        measuring = EngineMeasuring(engine, info, engine.capacity, tell)
        await measuring.run(seconds=seconds, weights=weights)
        sleep_s, wake_s = await _sleep(engine, weights) if weights and is_cpu_build() else (0.0, 0.0)
        return EngineMeasurements(
            device=_gpu_name(),
            capacity=engine.capacity,
            steps=tuple(measuring.steps),
            start_s=start_s,
            stop_s=tuple(measuring.stops),
            pause_s=tuple(measuring.pauses),
            sleep_s=sleep_s,
            wake_s=wake_s,
            weights_bytes=weights_bytes(root),
        )
    finally:
        await engine.stop()


def _gpu_name() -> str:
    from vllm.platforms import current_platform

    return "" if is_cpu_build() else str(current_platform.get_device_name())


async def _sleep(engine: "VllmEngine", weights: Path) -> tuple[float, float]:
    """Seconds to give up the weights' memory, and to have them back."""
    began = time.monotonic()
    await engine.give_up_weights()
    slept = time.monotonic()
    await engine.install(_AFTER_SLEEP, weights)
    return slept - began, time.monotonic() - slept


def _one_file(root: Path, tell: Callable[[str], None]) -> Path | None:
    files = sorted(root.glob("*.safetensors"))
    if len(files) == 1:
        return files[0]
    tell(f"installs are not measured: the checkpoint has {len(files)} files of weights, and a version has one")
    return None
