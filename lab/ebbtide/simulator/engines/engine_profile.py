"""Describes how fast an engine is: the time of a step by what it computes, memory for keys and values, delays."""

from typing import Annotated

from msgspec import Meta, Struct

Seconds = Annotated[float, Meta(ge=0.0)]
Share = Annotated[float, Meta(ge=0.0, le=1.0)]


class StepCosts(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The time of one engine step: a sum over what it reads and computes.

    Published steps of vLLM on H100 (`roofline`) and measured ones on CPUs fit a sum better than the larger of the time
    to read the weights and the time to compute.
    """

    base_s: Seconds = 0.0  # of every step: launches, exchanges between devices, scheduling; if measured, weights too
    weights_s: Seconds = 0.0  # to read the weights that every token uses
    experts_s: Seconds = 0.0  # to read all routed experts of a mixture; a step reads those that its tokens use
    expert_share: Share = 0.0  # share of the routed experts that one token uses
    token_s: Seconds = 0.0  # per token, decoded or prefilled
    sequence_s: Seconds = 0.0  # per decoding sequence, beyond that of its token
    context_s: Seconds = 0.0  # per token of context of a decoding sequence
    pair_s: Seconds = 0.0  # per pair of a prefilled token and a token that it attends to
    prompt_s: Seconds = 0.0  # per sequence that begins to be read, whatever its length
    spare: Annotated[int, Meta(ge=0)] = 0  # tokens, and sequences, whose cost hides behind reading the weights

    def step_s(self, *, batch: int, context: float, prefill: int = 0, pairs: int = 0, prompts: int = 0) -> float:
        """Seconds of a step. `batch` sequences decode and attend to `context` tokens, over all of them; `prefill`
        tokens are read, and attend to `pairs` tokens over all of them; `prompts` sequences begin to be read."""
        tokens = batch + prefill
        experts_s = self.experts_s
        if experts_s:  # tokens choose their experts independently of each other
            experts_s *= 1.0 - (1.0 - self.expert_share) ** tokens
        fixed_s = self.base_s + self.weights_s + experts_s
        fixed_s += self.token_s * max(0, tokens - self.spare) + self.sequence_s * max(0, batch - self.spare)
        return fixed_s + self.context_s * context + self.pair_s * pairs + self.prompt_s * prompts


class KvCapacity(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Memory for keys and values, and how the engine fills it."""

    tokens: Annotated[int, Meta(ge=1)]  # all that fit
    block: Annotated[int, Meta(ge=1)] = 16  # tokens that are allocated at once
    prefix_cache: bool = True  # keys and values of known tokens are used again
    whole_prompt_fits: bool = True  # a sequence starts only if all tokens that it has fit, as vLLM 0.32 does by default


class EngineDelays(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an engine takes to be there. A gigabyte has 1e9 bytes."""

    start_s: Seconds = 0.0  # from the start of its process to its first token; no boot of the machine, no pull
    admit_s: Seconds = 0.0  # from a sequence's assignment until a step may begin to read it
    stop_s: Seconds = 0.0  # from the wish to hold generation until it stands still
    install_s: Seconds = 0.0  # generation stands still for this and `install_s_per_gb` of weights
    install_s_per_gb: Seconds = 0.0
    sleep_s: Seconds = 0.0  # gives up its weights' memory
    wake_s: Seconds = 0.0  # has them back


class FitErrors(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How far a fitted profile is from what it was fitted to: relative errors of single observations."""

    observations: int
    median: float
    p90: float
    worst: float


class EngineProfile(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One engine: a model on the devices that share it."""

    name: str
    model: str
    device: str
    gpus: Annotated[int, Meta(ge=0)]  # 0: it runs on a CPU
    source: str  # where the numbers come from
    costs: StepCosts
    kv: KvCapacity
    batched_tokens: Annotated[int, Meta(ge=1)] = 8192  # most tokens of a step (vLLM's max_num_batched_tokens)
    sequences: Annotated[int, Meta(ge=1)] = 1024  # most that run at once (vLLM's max_num_seqs)
    weights_gb: Annotated[float, Meta(ge=0.0)] = 0.0  # of one version, over all its devices
    delays: EngineDelays = EngineDelays()
    errors: FitErrors | None = None  # None: not fitted to measurements

    def install_pause_s(self, weights_gb: float | None = None) -> float:
        """Seconds for which generation stands still while so much of a version is installed; None: all of it."""
        size = self.weights_gb if weights_gb is None else weights_gb
        return self.delays.install_s + self.delays.install_s_per_gb * size
