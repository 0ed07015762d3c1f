"""Describes how fast a trainer is: the time of a step by the samples that it trains on."""

from collections.abc import Sequence
from itertools import zip_longest
from random import Random
from typing import Annotated, NamedTuple

from msgspec import Meta, Struct

from ebbtide.simulator.engines.engine_profile import FitErrors, Seconds, Share
from ebbtide.trainer.learning.sample_deal import micro_parts, minibatches, shares

Count = Annotated[int, Meta(ge=1)]


class SampleLength(NamedTuple):
    """A sample as the deal sees it."""

    length: int  # tokens of prompt and response


class TrainerCosts(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The time of one rank's work. A rank pads the samples of a micro-batch to the longest of them."""

    token_s: Seconds  # per padded token, forward and backward
    pair_s: Seconds = 0.0  # per pair of a padded token and one of those before it in its row
    micro_batch_s: Seconds = 0.0  # per micro-batch
    update_s: Seconds = 0.0  # per optimiser step
    forward_share: Share = 1 / 3  # of a forward alone: a backward computes two products for each one of a forward


class TrainerDelays(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a trainer takes beside learning. A gigabyte has 1e9 bytes."""

    start_s: Seconds = 0.0
    snapshot_s: Seconds = 0.0  # the weights are copied before the next step may change them
    publish_s: Seconds = 0.0  # to encode and upload a version, beside the next step
    publish_s_per_gb: Seconds = 0.0  # of all its weights, changed or not
    checkpoint_s: Seconds = 0.0


class TrainerProfile(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One trainer: a model on the ranks that share its samples and weights."""

    name: str
    model: str
    device: str
    gpus: Annotated[int, Meta(ge=0)]  # 0: it runs on a CPU
    source: str  # where the numbers come from
    costs: TrainerCosts
    ranks: Count = 1  # that deal the samples among themselves
    micro_batch_tokens: Count = 16384  # most padded tokens of one, unless one sample has more
    weights_gb: Annotated[float, Meta(ge=0.0)] = 0.0  # of one version
    patch_share: Share = 1.0  # bytes of a patch, as a share of the weights'
    delays: TrainerDelays = TrainerDelays()
    errors: FitErrors | None = None  # None: not fitted to measurements

    def step_s(
        self,
        lengths: Sequence[int],
        *,
        updates: int = 1,
        epochs: int = 1,
        forwards: int = 0,
        seed: str = "",
    ) -> float:
        """Seconds to learn from samples of these tokens, prompts included.

        `updates`: optimiser steps in an epoch; `forwards`: further forwards of each sample, as for stale tokens or for
        a reference; `seed`: of the shuffle.
        """
        samples, rng = [SampleLength(length) for length in lengths], Random(seed)
        parts = [part for _ in range(epochs) for part in minibatches(samples, updates, rng)]
        return sum(self.gradient_s(part, forwards=forwards) + self.costs.update_s for part in parts)

    def gradient_s(self, samples: Sequence[SampleLength], *, forwards: int = 0) -> float:
        """Seconds for the gradient of some samples, without an optimiser step. All ranks wait for the slowest in each
        micro-batch, because they gather every layer together."""
        rows = [
            [self._micro_batch_s(part) for part in micro_parts(share, self.micro_batch_tokens)]
            for share in shares(samples, self.ranks)
        ]
        seconds = sum(max(row) for row in zip_longest(*rows, fillvalue=0.0))
        return seconds * (1.0 + self.costs.forward_share * forwards)

    def publish_s(self) -> float:
        """Seconds from the snapshot of a version to its announcement, while the trainer goes on."""
        return self.delays.publish_s + self.delays.publish_s_per_gb * self.weights_gb

    def _micro_batch_s(self, part: Sequence[SampleLength]) -> float:
        costs = self.costs
        longest = max(sample.length for sample in part)
        return costs.micro_batch_s + len(part) * (costs.token_s * longest + costs.pair_s * longest * longest / 2)
