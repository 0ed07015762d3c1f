"""Trains a network by steps of GRPO, without knowledge of runs, services or environments.

Of several ranks, each computes its share of every minibatch with its share of the network. All decisions of a step
(the deal of samples, the count of tokens) follow from the samples, which all ranks have.

A step either has all samples at once (`step`), or takes them part by part (`accumulate`, then `update`).

Invariant: `version` numbers the policy in the parameters between steps; only the caller sets it. Only `step` and
`update` change parameters and optimiser. A process that dies loses the step, with all gradients; the caller's
checkpoint remains.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ebbtide.trainer.learning.grpo import StepStats, StepSums, policy_loss, sampling_logprobs
from ebbtide.trainer.learning.network import Network
from ebbtide.trainer.learning.optimizer import AdamW, Schedule, rate_factor
from ebbtide.trainer.learning.packed_attention import packs
from ebbtide.trainer.learning.sample_deal import micro_parts, minibatches, shares
from ebbtide.trainer.learning.sampled_logprobs import CHUNK_LOGITS, Distribution, SampledLogprobs, agreeing_logprobs
from ebbtide.trainer.learning.training_batches import TrainingBatch, TrainingSample, idle_sample
from ebbtide.trainer.ranks.sharding import local, whole
from ebbtide.types.run import Sampling


class LearnerRanks(Protocol):
    """The ranks that compute a step together. All call everything in the same order."""

    rank: int
    size: int

    def add_up(self, values: Sequence[float]) -> list[float]:
        """The sums over all ranks."""


class OneRank:
    rank, size = 0, 1

    def add_up(self, values: Sequence[float]) -> list[float]:
        return list(values)


@dataclass(frozen=True, kw_only=True)
class LearnerSettings:
    """Settings of loss (see `policy_loss`) and optimiser, and the run's sampling."""

    learning_rate: float = 1e-6
    warmup_steps: int = 0
    schedule: Schedule = "constant"
    steps: int = 1  # of the schedule
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.99)
    max_grad_norm: float = 1.0
    clip_low: float = 0.2
    clip_high: float = 0.2
    importance_cap: float = 2.0
    truncated_importance_sampling: bool = False  # of tokens of the trainer's version, too
    kl_coefficient: float = 0.0
    minibatches: int = 1
    epochs: int = 1
    micro_batch_tokens: int = 16384
    dtype: str = "float32"  # of computation: or bfloat16
    packing: bool = False  # if the network can be packed
    sampling: Sampling = field(default_factory=Sampling)  # of samples without `responses`
    offload: bool = False  # keep the optimiser's moments in host memory
    eos_ids: tuple[int, ...] = ()  # of the model; with the stop tokens they are not sampled within `min_tokens`


@dataclass
class _Accumulated:
    """What was added to the gradients since the last update. Counts are of all ranks."""

    tokens: int = 0  # sampled
    stale: int = 0
    teaching: int = 0  # with an advantage
    sums: StepSums = field(default_factory=StepSums)  # of this rank; losses are not divided yet


class Learner:
    """Trains `network` in place. `reference` is the frozen network of the KL term. Several ranks shard both."""

    def __init__(
        self,
        network: Network,
        settings: LearnerSettings,
        *,
        version: int,
        reference: Network | None = None,
        ranks: LearnerRanks | None = None,
    ) -> None:
        self._ranks: LearnerRanks = ranks or OneRank()
        self.network = network
        self.settings = settings
        self.version = version
        self._reference = reference
        dtype = getattr(torch, settings.dtype)
        kinds = [{"packed": True}] * (settings.packing and packs(network)) + [{}, {"whole": True}]
        ways = [SampledLogprobs(network, dtype=dtype, chunk_logits=CHUNK_LOGITS, **kind) for kind in kinds]
        tokens = network.get_input_embeddings().num_embeddings
        self._own_logprobs = agreeing_logprobs(ways, tokens, self._ranks.add_up)
        self._reference_logprobs = None if reference is None else self._own_logprobs.of(reference)
        self._accumulated: _Accumulated | None = None  # None: the next sample begins an update
        self._optimizer = AdamW(
            network.parameters(),
            rate=settings.learning_rate,
            betas=settings.betas,
            weight_decay=settings.weight_decay,
            in_host=settings.offload,
        )
        warmup, steps = settings.warmup_steps, settings.steps
        self._scheduler = torch.optim.lr_scheduler.LambdaLR(
            self._optimizer, lambda step: rate_factor(step, settings.schedule, warmup_steps=warmup, steps=steps)
        )

    @property
    def packed(self) -> bool:
        """Whether micro-batches are packed."""
        return self._own_logprobs.packed

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of optimiser and scheduler; the network is saved in its own format."""
        return {"optimizer": self._optimizer.state_dict(), "scheduler": self._scheduler.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._optimizer.load_state_dict(state["optimizer"])
        self._scheduler.load_state_dict(state["scheduler"])

    def movable(self) -> Iterator[Tensor]:
        """Lists what only training needs: the optimiser's state, unfinished gradients, the reference network's weights.

        FSDP keeps its own views of a sharded reference network, which stays. Drops gradients that are used up."""
        if self._accumulated is None:
            self._optimizer.zero_grad()
        for state in self._optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor) and value.dim())
        yield from (parameter.grad for parameter in self.network.parameters() if parameter.grad is not None)
        if self._reference is not None:
            yield from (one for one in self._reference.parameters() if not isinstance(one, DTensor))

    def everything(self) -> Iterator[Tensor]:
        """Lists all that the device holds between steps: what is `movable`, and the weights and buffers of both
        networks. Tensors may share storage, which tied weights do."""
        yield from self.movable()
        for network in (self.network, self._reference):
            if network is not None:
                yield from network.parameters()
                yield from network.buffers()

    def step(self, samples: Sequence[TrainingSample], rng: Random) -> StepStats:
        """Updates on all `samples` (at least one), `epochs` times, in minibatches shuffled by `rng`."""
        rate = float(self._scheduler.get_last_lr()[0])
        tokens = sum(sample.sampled for sample in samples)
        stale = self._stale(samples)
        parts = [
            part for _ in range(self.settings.epochs) for part in minibatches(samples, self.settings.minibatches, rng)
        ]
        # Proximal logprobs precede any update, so they are computed for all parts first.
        batches = [self._own(part) for part in parts]
        first = stale or (self.settings.truncated_importance_sampling and len(parts) > 1)
        proximal = [[self._proximal(batch) for batch in part] for part in batches] if first else None
        sums = StepSums()
        for number, part in enumerate(batches):
            self._update(part, proximal[number] if proximal else [None] * len(part), _tokens(parts[number]), sums)
        self._scheduler.step()
        return sums.over_ranks(self._ranks.add_up).into(StepStats(tokens, stale, rate))

    def accumulate(self, samples: Sequence[TrainingSample]) -> None:
        """Adds the gradient of the loss of `samples` (at least one), summed over their tokens.

        `update` divides the sum, once all samples of the step were added, in any order and in any parts.
        """
        if self._accumulated is None:
            self._optimizer.zero_grad()
            self._accumulated = _Accumulated()
        found = self._accumulated
        found.tokens += sum(sample.sampled for sample in samples)
        found.stale += self._stale(samples)
        found.teaching += sum(sample.sampled for sample in samples if sample.advantage)
        for batch in self._own(samples):
            if batch is None:
                self._idle(self._own_logprobs).backward()  # type: ignore[no-untyped-call]
            else:
                self._pass(batch, None, _Tokens(1, 1), found.sums)

    def update(self) -> StepStats:
        """Takes one optimiser step on what was accumulated (at least one sample), divided as for one minibatch.

        The gradient equals that of all samples at once, but for the order of its sums.
        """
        found, self._accumulated = self._accumulated, None
        if found is None:
            raise RuntimeError("no sample was accumulated")
        rate, divisor = float(self._scheduler.get_last_lr()[0]), max(1, found.teaching)
        for parameter in self.network.parameters():
            if parameter.grad is not None:
                local(parameter.grad).div_(divisor)
        found.sums.values["loss"] /= divisor
        self._apply(found.sums)
        self._scheduler.step()
        return found.sums.over_ranks(self._ranks.add_up).into(StepStats(found.tokens, found.stale, rate))

    def _logprobs(self, under: SampledLogprobs, batch: TrainingBatch) -> tuple[Tensor, Tensor]:
        """Logprob and entropy at each of the batch's sampled tokens; both (n,)."""
        return under(batch, [self._distribution(sampling) for sampling in batch.samplings])

    def _distribution(self, sampling: Sampling | None) -> Distribution:
        """From logits to the logprobs of what was sampled in this way; None: in that of the settings."""
        sampling = sampling or self.settings.sampling
        # Each once: `index_copy` would give a token that is named twice its gradient twice.
        ends = sorted({*sampling.stop_token_ids, *(() if sampling.ignore_eos else self.settings.eos_ids)})

        def logprobs(logits: Tensor, tokens: Tensor, positions: Tensor) -> Tensor:
            barred = [token for token in ends if token < logits.shape[1]] if sampling.min_tokens else []
            return sampling_logprobs(
                logits,
                tokens,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                min_p=sampling.min_p,
                barred=torch.tensor(barred, dtype=torch.int64, device=logits.device) if barred else None,
                early=positions < sampling.min_tokens,
            )

        return logprobs

    def _stale(self, samples: Sequence[TrainingSample]) -> int:
        """Counts sampled tokens of other versions."""
        return sum(int((sample.versions[sample.mask] != self.version).sum()) for sample in samples)

    def _own(self, samples: Sequence[TrainingSample]) -> list[TrainingBatch | None]:
        """Returns this rank's micro-batches, padded by None: all ranks gather each layer together."""
        most, packed = self.settings.micro_batch_tokens, self.packed
        parts = [list(micro_parts(share, most, packed=packed)) for share in shares(samples, self._ranks.size)]
        own: list[TrainingBatch | None] = [self._own_logprobs.collate(part) for part in parts[self._ranks.rank]]
        return own + [None] * (max(map(len, parts)) - len(own))

    def _idle(self, under: SampledLogprobs) -> Tensor:
        """Takes part in a pass of the other ranks. Returns 0, with a gradient of 0."""
        found, _ = self._logprobs(under, under.collate([idle_sample()]))
        return found.sum() * 0.0

    def _proximal(self, batch: TrainingBatch | None) -> Tensor | None:
        with torch.no_grad():
            if batch is None:
                self._idle(self._own_logprobs)
                return None
            now, _ = self._logprobs(self._own_logprobs, batch)
        return self._anchor(batch, now)

    def _anchor(self, batch: TrainingBatch, now: Tensor) -> Tensor:
        """What ratios are taken to: stale tokens have drifted to `now` (n,) before the step."""
        if self.settings.truncated_importance_sampling:
            return now
        return torch.where(batch.versions == self.version, batch.behaviour, now)

    def _update(
        self,
        batches: Sequence[TrainingBatch | None],
        proximal: Sequence[Tensor | None],
        tokens: "_Tokens",
        sums: StepSums,
    ) -> None:
        """Takes an optimiser step on the micro-batches of one minibatch, which has `tokens` on all ranks."""
        self._optimizer.zero_grad()
        for batch, anchor in zip(batches, proximal, strict=True):
            if batch is not None:
                self._pass(batch, anchor, tokens, sums)
                continue
            nothing = self._idle(self._own_logprobs)
            self._under_reference(None)
            nothing.backward()  # type: ignore[no-untyped-call]
        self._apply(sums)

    def _apply(self, sums: StepSums) -> None:
        """Takes an optimiser step on the gradients, clipped."""
        norm = whole(torch.nn.utils.clip_grad_norm_(self.network.parameters(), self.settings.max_grad_norm))
        self._optimizer.step()
        sums.updates += 1
        sums.norm += norm.item()

    def _pass(self, batch: TrainingBatch, anchor: Tensor | None, tokens: "_Tokens", sums: StepSums) -> None:
        """Runs one micro-batch forward and backward. Without an `anchor` its own forward gives it: so only before the
        step's first update."""
        settings = self.settings
        logprobs, entropy = self._logprobs(self._own_logprobs, batch)
        parts = policy_loss(
            logprobs,
            batch.behaviour,
            batch.advantages,
            normalizer=tokens.teaching,
            kl_normalizer=tokens.sampled,
            proximal=self._anchor(batch, logprobs.detach()) if anchor is None else anchor,
            reference=self._under_reference(batch),
            clip_low=settings.clip_low,
            clip_high=settings.clip_high,
            importance_cap=settings.importance_cap,
            kl_coefficient=settings.kl_coefficient,
        )
        parts.loss.backward()  # type: ignore[no-untyped-call]
        if sums.updates == 0:
            sums.add_gaps((logprobs.detach() - batch.behaviour)[batch.versions == self.version])
        sums.passes += parts.tokens
        sums.add(loss=parts.loss.item(), entropy=entropy.sum().item())
        sums.add(clipped=parts.clipped, kl=parts.kl, weight=parts.weight)

    def _under_reference(self, batch: TrainingBatch | None) -> Tensor | None:
        """The logprobs of the KL term, (n,), if there is one. None takes part in a pass of the other ranks."""
        if self._reference_logprobs is None or not self.settings.kl_coefficient:
            return None
        with torch.no_grad():
            if batch is None:
                return self._idle(self._reference_logprobs)
            return self._logprobs(self._reference_logprobs, batch)[0]


class _Tokens(NamedTuple):
    """Tokens of a minibatch."""

    teaching: int  # with an advantage; at least 1
    sampled: int


def _tokens(samples: Sequence[TrainingSample]) -> _Tokens:
    teaching = sum(sample.sampled for sample in samples if sample.advantage)
    return _Tokens(max(1, teaching), sum(sample.sampled for sample in samples))
