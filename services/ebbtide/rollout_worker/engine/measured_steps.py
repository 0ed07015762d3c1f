"""Records what engine steps were measured to take, and what they computed."""

from msgspec import Struct


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


class EngineCapacity(Struct, frozen=True, kw_only=True):
    """What an engine holds and schedules at most."""

    kv_tokens: int
    kv_block: int
    batched_tokens: int  # of a step
    sequences: int  # that run at once
    prefix_cache: bool
    whole_prompt_fits: bool  # a sequence starts only if all tokens that it has fit


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
