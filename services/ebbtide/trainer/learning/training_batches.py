"""Makes micro-batches (one backward each) of padded tensors from samples."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ebbtide.trainer.learning.sample_deal import micro_parts
from ebbtide.types.rollout import SampledResponse
from ebbtide.types.run import Sampling


@dataclass(frozen=True)
class TrainingSample:
    """One trajectory. Only at sampled tokens do logprobs and versions mean anything."""

    ids: npt.NDArray[np.int64]  # (t,): the prompt, then the m ids after it, over which the other arrays run
    mask: npt.NDArray[np.bool_]  # (m,): true where the policy sampled, false where an environment wrote
    logprobs: npt.NDArray[np.float32]
    versions: npt.NDArray[np.int64]
    advantage: float
    responses: tuple[SampledResponse, ...] = ()  # in the arrays; empty: all were sampled as the run says

    @property
    def length(self) -> int:
        return len(self.ids)

    @property
    def sampled(self) -> int:
        return int(self.mask.sum())

    @property
    def positions(self) -> npt.NDArray[np.int64]:
        """Each sampled token's position in its response, (sampled,), from 0. Without `responses`, an environment's
        tokens end one.
        """
        order = np.arange(len(self.mask))
        if self.responses:
            begun = np.zeros(len(self.mask), dtype=np.int64)
            for one in self.responses:
                begun[one.start : one.end] = one.start
        else:
            begun = np.maximum.accumulate(np.where(self.mask, -1, order)) + 1
        positions: npt.NDArray[np.int64] = (order - begun)[self.mask]
        return positions

    def sampled_by(self, known: dict[Sampling | None, int]) -> npt.NDArray[np.int64]:
        """The number in `known` of how each sampled token was sampled, (sampled,). Adds what is not known yet."""
        numbers = np.zeros(len(self.mask), dtype=np.int64)
        if not self.responses:
            numbers[:] = known.setdefault(None, len(known))
        for one in self.responses:
            numbers[one.start : one.end] = known.setdefault(_distribution(one.sampling), len(known))
        return numbers[self.mask]


@dataclass(frozen=True)
class TrainingBatch:
    """Samples padded on the right; tensors of shape (n,) run over the sampled tokens, row by row."""

    ids: Tensor  # (b, t) int64
    mask: Tensor  # (b, t) bool, true at sampled tokens
    targets: Tensor  # (n,), as all below
    positions: Tensor  # in their responses, from 0
    behaviour: Tensor
    versions: Tensor
    advantages: Tensor
    sampled_by: Tensor  # numbers of `samplings`
    samplings: tuple[Sampling | None, ...]  # at least one; None: as the run says

    def to(self, device: torch.device) -> "TrainingBatch":
        tensors = {name: one.to(device) for name, one in vars(self).items() if isinstance(one, Tensor)}
        return TrainingBatch(samplings=self.samplings, **tensors)

    def logits(self, network: torch.nn.Module) -> Tensor:
        """Returns the network's logits for each sampled token, (n, v), from the position before it.

        Rows need no attention mask: a causal network never sees padding on the right. Logits begin at the first sampled
        token, as those of a large vocabulary are the largest tensor of all.
        """
        first = int(self.mask.any(0).nonzero()[0])
        length = self.ids.shape[1]
        output = network(input_ids=self.ids[:, :-1], use_cache=False, logits_to_keep=length - first)
        kept: Tensor = output.logits
        return kept[self.mask[:, first:]]


def collate(samples: Sequence[TrainingSample], *, pad_id: int = 0) -> TrainingBatch:
    """Makes one batch of samples, each with at least one sampled token."""
    length, known = max(len(sample.ids) for sample in samples), dict[Sampling | None, int]()
    ids = np.full((len(samples), length), pad_id, dtype=np.int64)
    mask = np.zeros((len(samples), length), dtype=np.bool_)
    for row, sample in enumerate(samples):
        end = len(sample.ids)
        ids[row, :end] = sample.ids
        mask[row, end - len(sample.mask) : end] = sample.mask
    return TrainingBatch(
        ids=torch.from_numpy(ids),
        mask=torch.from_numpy(mask),
        targets=torch.from_numpy(ids[mask]),
        positions=torch.from_numpy(np.concatenate([s.positions for s in samples])),
        behaviour=torch.from_numpy(np.concatenate([s.logprobs[s.mask] for s in samples]).astype(np.float32)),
        versions=torch.from_numpy(np.concatenate([s.versions[s.mask] for s in samples]).astype(np.int64)),
        advantages=torch.from_numpy(np.repeat([s.advantage for s in samples], [s.sampled for s in samples])).float(),
        sampled_by=torch.from_numpy(np.concatenate([s.sampled_by(known) for s in samples])),
        samplings=tuple(known),
    )


def _distribution(sampling: Sampling) -> Sampling:
    """What of it changes logprobs, so that responses that differ in the rest are computed together."""
    held = ("min_tokens", "stop_token_ids", "ignore_eos") if sampling.min_tokens else ()
    return Sampling(**{name: getattr(sampling, name) for name in ("temperature", "top_p", "top_k", "min_p", *held)})


def micro_batches(samples: Sequence[TrainingSample], max_tokens: int) -> Iterator[TrainingBatch]:
    """Makes batches of at most `max_tokens` padded tokens (at least one sample), of like lengths."""
    return map(collate, micro_parts(samples, max_tokens))
