"""Defines what the work of a served engine and of a borrowed rollout engine costs on the device that they share.

The defaults are of no measured engine. Costs that were fitted to a real pair (`benchmarks/pair/virtual`) are a file.
"""

from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from ebbtide.errors import InvalidRequest

Seconds = Annotated[float, Meta(ge=0, le=3600)]
Count = Annotated[int, Meta(ge=0, le=1 << 40)]
Speed = Annotated[float, Meta(gt=0, le=1)]
CoreShare = Annotated[float, Meta(ge=0, le=0.95)]


class PairMemory(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Memory for the keys and values of both engines. Without a limit neither engine ever lacks any."""

    limit_mib: Count = 0  # for both engines; 0: no limit
    serving_kv_mib: Count = 0  # the served engine's pool; 0: as the limit
    served_token_bytes: Count = 0
    rollout_kv_mib: Count = 0  # the rollout engine's pool
    rollout_token_bytes: Count = 0
    block_tokens: Annotated[int, Meta(ge=1, le=1024)] = 16


class StrayProcess(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A process that belongs to neither engine and takes a part of a core at random. It computes in bursts; a step that
    meets one goes on slower meanwhile. The threads of an engine wait for one another, so one core slows down all."""

    least: CoreShare = 0.0  # part of the time in bursts, drawn evenly for each spell from here
    most: CoreShare = 0.0  # to here; 0: there is no such process
    spell_s: Seconds = 4.0  # mean length of a spell (exponential)
    burst_s: Seconds = 0.02  # mean length of a burst (exponential)
    serving: Speed = 0.5  # part of its own speed at which the served engine goes on in a burst
    rollouts: Speed = 0.35  # the same of the rollout engine, which has a lower priority


class CostResidual(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How far one figure of a real pair is from the pair with the fitted costs, which served the same requests."""

    figure: str
    measured: float
    modelled: float
    requests: int  # that both figures rest on

    @property
    def error(self) -> float:
        """The model's relative error; 0.0 where the measured figure is 0."""
        return self.modelled / self.measured - 1.0 if self.measured else 0.0


class PairCosts(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Durations without disturbance, in seconds, and limits of both engines."""

    source: str = ""  # what was measured where
    # A step of the served engine costs the sum over its chunks of prompts, and over the requests that decode in it.
    prefill_s: Seconds = 0.01  # of each prompt
    prefill_token_s: Seconds = 0.0002
    decode_s: Seconds = 0.009  # of a step in which requests decode
    decode_each_s: Seconds = 0.0002  # of each of them
    chunk_tokens: Annotated[int, Meta(ge=1)] = 2048  # of prompts in one step, at most
    # A rollout step, and the time between two of them.
    step_s: Seconds = 0.004
    step_token_s: Seconds = 0.000125
    between_s: Seconds = 0.0
    slots: Annotated[int, Meta(ge=1, le=4096)] = 32  # rollouts in the engine
    step_tokens: Annotated[int, Meta(ge=1, le=1 << 20)] = 256  # of a step, at most
    wake_s: Seconds = 60.0  # to load weights that were given up
    # While steps of both engines overlap, each goes on at this part of its own speed. 0.5 each: they share the device.
    serving_beside: Speed = 0.5
    rollouts_beside: Speed = 0.5
    noise: Annotated[float, Meta(ge=0, le=2)] = 0.05  # standard deviation of the logarithm of durations
    hiccup: Count = 2000  # one step in so many takes four times as long; 0: none
    stray: StrayProcess = StrayProcess()
    memory: PairMemory = PairMemory()
    residuals: tuple[CostResidual, ...] = ()

    @property
    def tokens_per_s(self) -> float:
        """Rollout tokens/s with all slots decoding and no served request."""
        batch = min(self.slots, self.step_tokens)
        return batch / (self.step_s + self.step_token_s * batch + self.between_s)

    def prefill(self, tokens: int) -> float:
        """Seconds of a prompt of so many tokens by itself."""
        return self.prefill_s + self.prefill_token_s * tokens

    def decode(self, batch: int) -> float:
        """Seconds of a step in which so many requests decode."""
        return self.decode_s + self.decode_each_s * batch if batch else 0.0

    def checked(self) -> "PairCosts":
        """Return these costs. Raises `InvalidRequest` naming the field if no work could cost nothing or never fit."""
        for field in ("prefill_s", "decode_s", "step_s"):
            if not getattr(self, field):
                raise InvalidRequest("must be above 0 seconds, because no work is free", field=field)
        self._check_stray()
        memory = self.memory
        needed = (memory.served_token_bytes, memory.rollout_token_bytes, memory.rollout_kv_mib)
        if memory.limit_mib and not all(needed):
            message = "needs served_token_bytes, rollout_token_bytes and rollout_kv_mib, to know what the engines hold"
            raise InvalidRequest(message, field="memory.limit_mib")
        return self

    def _check_stray(self) -> None:
        stray = self.stray
        if stray.least > stray.most:
            raise InvalidRequest("must be at least stray.least; raise it", field="stray.most")
        if stray.most and not (stray.spell_s and stray.burst_s):
            raise InvalidRequest("must be above 0 seconds", field="stray.spell_s, burst_s")


def read_pair_costs(path: Path) -> PairCosts:
    """Read a profile (JSON). Raises `InvalidRequest` that names the file, the field and what is wrong."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=PairCosts).checked()
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, InvalidRequest) as error:
        raise InvalidRequest(f"cannot be read as a pair's costs: {error}", field=str(path)) from None


def pair_costs_text(costs: PairCosts) -> str:
    """The profile as JSON; `read_pair_costs` reads the same costs back."""
    return msgspec.json.format(msgspec.json.encode(costs), indent=2).decode() + "\n"
