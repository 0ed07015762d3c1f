"""Records what engine steps were measured to take, and what they computed."""

from msgspec import Struct


class StepGroup(Struct, frozen=True, kw_only=True):
    """Like steps. `batch` sequences decode in each, with `context` tokens over all of them on average; `prefill` tokens
    are read in each, which attend to `pairs` tokens over all of them."""

    steps: int
    batch: int
    context: float = 0.0
    prefill: int = 0
    pairs: int = 0


class MeasuredSteps(Struct, frozen=True, kw_only=True):
    """Steps that followed each other, and the seconds of all of them."""

    seconds: float
    groups: tuple[StepGroup, ...]

    @property
    def steps(self) -> int:
        return sum(group.steps for group in self.groups)


class EngineMeasurements(Struct, frozen=True, kw_only=True):
    """One engine, measured. Bytes of all devices."""

    steps: tuple[MeasuredSteps, ...]
    start_s: float  # of its process to its first token
    pause_s: tuple[float, ...]  # generation stood still for an install of the same weights
    weights_bytes: int
    kv_tokens: int
    kv_block: int
    batched_tokens: int
    sequences: int
    prefix_cache: bool
    whole_prompt_fits: bool
