"""Computes the logprobs of a micro-batch's sampled tokens under a network, without all their logits at once.

The logits of a large vocabulary are the largest tensors of a training by far: 16,384 tokens of 151,936 take 10 GB in
float32, and their softmax, entropy and gradients as much again, each. So only positions before a sampled token reach
the head, and these in chunks, whose logits are computed again in the backward pass (as in Cut Cross-Entropy, arXiv
2411.09009, and Liger Kernel, arXiv 2410.10989, section 3.2; here in plain torch, since sampling truncates the support).

A network's own code may do more to its logits than multiply by the head. Known forms of that are repeated here, and
`agreeing` compares the result with the network's own logits once, before anything is trained; a network that disagrees
computes all logits at once.

Invariant: nothing here outlives a pass, but the method that `SampledLogprobs` adds to its network.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import register_fsdp_forward_method
from torch.nn.functional import linear

from ebbtide.errors import InvalidRequest
from ebbtide.telemetry import get_logger
from ebbtide.trainer.learning.grpo import at_tokens, sampling_logprobs
from ebbtide.trainer.learning.network import Network
from ebbtide.trainer.learning.packed_attention import PACKED
from ebbtide.trainer.learning.training_batches import TrainingBatch, TrainingSample, collate, pack

log = get_logger(__name__)

#: Logits of a chunk: 256 MiB in float32. A chunk's pass needs some five times that.
CHUNK_LOGITS: Final = 1 << 26
#: Largest mean difference, in nats, between the logprobs of two ways to compute them.
_AGREE: Final = {torch.float32: 1e-3, torch.bfloat16: 0.1}
#: From logits (n, v), the tokens (n,) that were sampled and their positions in their responses (n,), to the logprobs of
#: the distributions that they were sampled from, (n, v) float32.
Distribution = Callable[[Tensor, Tensor, Tensor], Tensor]


class HeadForm(NamedTuple):
    """What becomes of the head's output: times `scale`, then squashed to [-cap, cap] by a tanh, if there is a cap."""

    scale: float = 1.0
    cap: float | None = None

    def apply(self, logits: Tensor) -> Tensor:
        if self.scale != 1.0:
            logits = logits * self.scale
        return logits if self.cap is None else torch.tanh(logits / self.cap) * self.cap


def head_form(network: Network) -> HeadForm | None:
    """Returns what a network's configuration says of its logits; None if its head is no linear layer."""
    head, config = network.get_output_embeddings(), network.config.get_text_config()
    if type(head).__mro__.count(nn.Linear) != 1 or network.base_model is network:
        return None
    scale = 1.0
    for name in ("logit_scale", "lm_head_multiplier"):  # Cohere; Falcon H1
        scale *= getattr(config, name, None) or 1.0
    scale /= getattr(config, "logits_scaling", None) or 1.0  # Granite
    return HeadForm(scale, getattr(config, "final_logit_softcapping", None))  # Gemma 2


@dataclass(frozen=True)
class _Chunks:
    """How rows (n, h) become logprobs, `rows` of them at a time, in the dtype of computation."""

    rows: int
    dtype: torch.dtype
    form: HeadForm
    distribution: Distribution

    def slices(self, count: int) -> Iterator[slice]:
        return (slice(start, start + self.rows) for start in range(0, count, self.rows))


class _ChunkedLogprobs(torch.autograd.Function):
    """Logprobs and entropies, both (n,) float32, of `tokens` (n,) from hidden states (n, h), `weight` (v, h) and `bias`
    (v,) or None. Of each chunk, only its hidden states outlive the forward pass.

    The gradient of the weight is summed in float32 over the chunks, also where the weight itself is bfloat16.
    """

    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[Tensor, Tensor]:
        hidden, weight, bias, tokens, positions, chunks = given
        ctx.save_for_backward(hidden, weight, bias, tokens, positions)
        ctx.chunks = chunks
        low, low_bias = weight.to(chunks.dtype), None if bias is None else bias.to(chunks.dtype)
        found = [
            at_tokens(
                chunks.distribution(
                    chunks.form.apply(linear(hidden[part].to(chunks.dtype), low, low_bias)),
                    tokens[part],
                    positions[part],
                ),
                tokens[part],
            )
            for part in chunks.slices(len(tokens))
        ]
        logprobs, entropy = (torch.cat(parts) for parts in zip(*found, strict=True))
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, tokens, positions = ctx.saved_tensors
        chunks, of_logprobs, low = ctx.chunks, grads[0], weight.to(ctx.chunks.dtype)
        low_bias = None if bias is None else bias.to(chunks.dtype)
        of_hidden = torch.empty_like(hidden)
        of_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        of_bias = torch.zeros_like(bias, dtype=torch.float32) if bias is not None and ctx.needs_input_grad[2] else None
        for part in chunks.slices(len(tokens)):
            rows = hidden[part].to(chunks.dtype)
            with torch.enable_grad():
                logits = linear(rows, low, low_bias).requires_grad_()
                logprobs = chunks.distribution(chunks.form.apply(logits), tokens[part], positions[part])
                own = logprobs.gather(1, tokens[part][:, None])[:, 0]
            (slope,) = torch.autograd.grad(own, logits, of_logprobs[part])
            del logits, logprobs, own
            of_hidden[part] = slope @ low
            if of_weight is not None:
                of_weight += slope.t() @ rows
            if of_bias is not None:
                of_bias += slope.sum(0, dtype=torch.float32)
        return (
            of_hidden,
            None if of_weight is None else of_weight.to(weight.dtype),
            None if of_bias is None else of_bias.to(bias.dtype),
            None,
            None,
            None,
        )


class SampledLogprobs:
    """Computes logprob and entropy at each sampled token of a batch, both (n,) float32, under one network.

    `whole` computes all logits by the network's own code. `packed`: batches are packed rows, which `packs` must allow;
    not with `whole`. `dtype` is that of computation. `use` comes before the first pass, and after that of another one
    on the same network. The head's weight of a sharded network is gathered once in a forward pass and once in a
    backward pass, however many chunks there are.
    """

    def __init__(
        self,
        network: Network,
        *,
        dtype: torch.dtype,
        whole: bool = False,
        packed: bool = False,
        chunk_logits: int = CHUNK_LOGITS,
    ) -> None:
        self._network, self._dtype, self._chunk_logits = network, dtype, chunk_logits
        self._head = None if whole else head_form(network)
        self.packed = packed and self._head is not None
        native = network.config._attn_implementation  # noqa: SLF001
        self._attention = PACKED if self.packed else "sdpa" if native == PACKED else native
        if self._head is not None and not hasattr(network, _METHOD):
            setattr(network, _METHOD, MethodType(_in_forward, network))
            register_fsdp_forward_method(network, _METHOD)

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype

    @property
    def device(self) -> torch.device:
        found: torch.device = next(self._network.parameters()).device
        return found

    @property
    def whole(self) -> bool:
        return self._head is None

    def of(self, network: Network) -> "SampledLogprobs":
        """Returns what computes in the same way under another network of the same architecture."""
        found = SampledLogprobs(
            network, dtype=self._dtype, whole=self.whole, packed=self.packed, chunk_logits=self._chunk_logits
        )
        return found.use()

    def use(self) -> "SampledLogprobs":
        """Gives the network the attention that this needs, also in the backward pass."""
        self._network.set_attn_implementation(self._attention)
        return self

    def collate(self, samples: Sequence[TrainingSample]) -> TrainingBatch:
        """Makes a batch for this of samples, each with at least one sampled token."""
        return (pack(samples) if self.packed else collate(samples)).to(self.device)

    def __call__(self, batch: TrainingBatch, distributions: Sequence[Distribution]) -> tuple[Tensor, Tensor]:
        """`distributions`: one for each of the batch's samplings."""
        with self._precision(batch.ids.device.type):
            if self._head is None:
                logits = batch.logits(self._network)
                return _each_sampling(batch, distributions, logits, _at_once)
            found: tuple[Tensor, Tensor] = getattr(self._network, _METHOD)(self._from_hidden, batch, distributions)
            return found

    def _from_hidden(
        self, network: Network, batch: TrainingBatch, distributions: Sequence[Distribution]
    ) -> tuple[Tensor, Tensor]:
        """Runs inside the network's forward pass, where a sharded network has its head's weight."""
        head: nn.Linear = network.get_output_embeddings()
        dtype = self._dtype if self._dtype != torch.float32 else head.weight.dtype
        rows = max(1, self._chunk_logits // head.weight.shape[0])
        form = self._head or HeadForm()

        def compute(hidden: Tensor, tokens: Tensor, positions: Tensor, how: Distribution) -> tuple[Tensor, Tensor]:
            if len(tokens) <= rows:
                return at_tokens(how(form.apply(head(hidden)), tokens, positions), tokens)
            with torch.autocast(hidden.device.type, enabled=False):
                given = (hidden, head.weight, head.bias, tokens, positions, _Chunks(rows, dtype, form, how))
                found: tuple[Tensor, Tensor] = _ChunkedLogprobs.apply(*given)  # type: ignore[no-untyped-call]
            return found

        return _each_sampling(batch, distributions, batch.hidden(network), compute)

    def _precision(self, device: str) -> contextlib.AbstractContextManager[object]:
        """Without autocast's cache, which would keep copies of all weights through a forward pass."""
        if self._dtype == torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(device, self._dtype, cache_enabled=False)


#: Name of the method by which `SampledLogprobs` runs inside a network's forward pass.
_METHOD: Final = "ebbtide_sampled_logprobs"


def _in_forward(network: Network, compute: Callable[..., Any], *given: Any) -> Any:
    return compute(network, *given)


def _at_once(logits: Tensor, tokens: Tensor, positions: Tensor, how: Distribution) -> tuple[Tensor, Tensor]:
    return at_tokens(how(logits, tokens, positions), tokens)


def _each_sampling(
    batch: TrainingBatch,
    distributions: Sequence[Distribution],
    rows: Tensor,
    compute: Callable[[Tensor, Tensor, Tensor, Distribution], tuple[Tensor, Tensor]],
) -> tuple[Tensor, Tensor]:
    """Computes the tokens of each sampling together, from `rows` (n, ...). Returns both (n,) in the batch's order."""
    if len(distributions) == 1:
        return compute(rows, batch.targets, batch.positions, distributions[0])
    # Rows are sorted once and split: an index for each sampling would have a gradient as large as all rows.
    order = batch.sampled_by.argsort(stable=True)
    counts = batch.sampled_by.bincount(minlength=len(distributions)).tolist()
    values = (rows[order], batch.targets[order], batch.positions[order])
    split = zip(*(value.split_with_sizes(counts) for value in values), distributions, strict=True)
    found, entropy = zip(*(compute(*part) for part in split), strict=True)
    back = order.argsort()
    return torch.cat(found)[back], torch.cat(entropy)[back]


def agreeing_logprobs(
    candidates: Sequence[SampledLogprobs], tokens: int, add_up: Callable[[Sequence[float]], list[float]]
) -> SampledLogprobs:
    """Returns the first candidate that finds the logprobs that the last one finds, which is taken otherwise.

    They are compared on two short samples of a vocabulary of so many `tokens`. Several ranks agree by `add_up`, which
    sums over all of them.
    """
    *others, own = candidates
    samples = [_probe(length, tokens) for length in (9, 6)]
    with torch.no_grad():
        expected, _ = own.use()(own.collate(samples), [_as_sampled])
        for one in others:
            try:
                found, _ = one.use()(one.collate(samples), [_as_sampled])
                difference = (found - expected).abs().mean().item()
            except (InvalidRequest, TypeError) as error:  # the network's code does not take what this one passes
                log.warning("another way is taken: the network refuses this one", packed=one.packed, reason=str(error))
                difference = math.inf
            if not add_up([float(not difference <= _AGREE[one.dtype])])[0]:
                return one
            if math.isfinite(difference):
                log.warning("another way is taken: this one finds other logprobs", packed=one.packed, nats=difference)
    return own.use()


def _probe(length: int, tokens: int) -> TrainingSample:
    ids = np.random.default_rng(length).integers(0, tokens, length)
    nothing = np.zeros(length - 1, dtype=np.float32)
    return TrainingSample(ids, nothing == 0, nothing, nothing.astype(np.int64), advantage=0.0)


def _as_sampled(logits: Tensor, tokens: Tensor, _positions: Tensor) -> Tensor:
    return sampling_logprobs(logits, tokens)
