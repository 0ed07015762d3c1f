"""Sampled at temperature 1, tokens behind a cut have the distribution of those without one: the network's own. So have
drafted ones.

Of each token sampled the network itself, run by another library, says how probable every token was there. What came,
less what was to be expected, summed over all of them, is a vector whose covariance is known; its square in that metric
is chi-square distributed with one degree of freedom less than the vocabulary has tokens, whatever the contexts were.
"""

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pytest

from ebbtide.types.rollout import SampledResponse
from ebbtide.types.run import Sampling
from tests.e2e import exact_samples
from tests.e2e.facts import facts_of
from tests.e2e.tolerances import within

#: Responses of each kind, and tokens of each: enough to see one token in a hundred that is not the one it should be.
FAST: Final = (600, 48)
NIGHTLY: Final = (3000, 48)
VOCABULARY: Final = 8
SHIFT: Final = 0.01
#: A deviation less probable than this is none of chance.
ALPHA: Final = 1e-3

pytestmark = pytest.mark.timeout(1200)  # the first test waits for the samples

Array = npt.NDArray[np.float64]


class Sample:
    """Tokens of one kind of response: `ids` (N) and how probable each token was there, `probable` (N, V)."""

    def __init__(self, ids: npt.NDArray[np.int64], probable: Array) -> None:
        self.ids, self.probable = ids, probable

    def deviation(self) -> tuple[Array, Array]:
        """What came less what was to be expected, per token sampled (V), and its covariance (V, V)."""
        came = np.eye(VOCABULARY)[self.ids]
        deviation = (came - self.probable).sum(axis=0)
        covariance = np.diag(self.probable.sum(axis=0)) - self.probable.T @ self.probable
        return deviation / len(self.ids), covariance / len(self.ids) ** 2

    def chance(self) -> float:
        """How probable a deviation as large as this one's is."""
        return chance(*self.deviation())

    def shifted(self, random: np.random.Generator) -> "Sample":
        """With `SHIFT` of all probability moved from one token to another, as a wrong sampler would."""
        common = np.flatnonzero(self.probable.mean(axis=0) > 2 * SHIFT)
        giver, taker = random.choice(common, 2, replace=False)
        share = SHIFT / self.probable[:, giver].mean()
        changed = (self.ids == giver) & (random.random(len(self.ids)) < share)
        return Sample(np.where(changed, taker, self.ids), self.probable)


def chance(deviation: Array, covariance: Array) -> float:
    import torch

    square = float(deviation @ np.linalg.pinv(covariance, rcond=1e-9) @ deviation)
    return float(torch.special.gammaincc(torch.tensor((VOCABULARY - 1) / 2), torch.tensor(square / 2)))


def load(checkpoint: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(checkpoint, local_files_only=True, dtype=torch.float32)


def probabilities(checkpoint: Path, prompt: list[int], ids: npt.NDArray[np.int64]) -> Array:
    """What the network says of each token of each response: (responses, length, V)."""
    import torch

    network = load(checkpoint)
    prompts = np.broadcast_to(np.array(prompt), (len(ids), len(prompt)))
    with torch.no_grad():
        whole = torch.from_numpy(np.concatenate([prompts, ids], axis=1))
        parts = [whole[start : start + 256] for start in range(0, len(whole), 256)]
        found = [network(part).logits[:, len(prompt) - 1 : -1].double().softmax(-1).numpy() for part in parts]
    return np.concatenate(found)


class Samples:
    def __init__(self, checkpoint: Path, speculation: str, responses: int, length: int) -> None:
        facts = facts_of("exact_samples", checkpoint, speculation, responses, length, within_s=900.0)
        self.speculates, self.drafts = speculation != "off", facts["drafts"]
        self._checkpoint, self._facts = checkpoint, facts
        self.whole, self.cut = (self._sample(checkpoint, kind) for kind in ("whole", "cut"))
        first = np.zeros((responses, length), bool)
        for row, response in zip(first, facts["cut"], strict=True):
            row[response["cuts"]] = True
        self.behind = Sample(self.cut.ids[first.ravel()], self.cut.probable[first.ravel()])

    def _sample(self, checkpoint: Path, kind: str) -> Sample:
        ids = np.array([response["ids"] for response in self._facts[kind]])
        probable = probabilities(checkpoint, self._facts["prompt"], ids)
        return Sample(ids.ravel(), probable.reshape(-1, VOCABULARY))

    def logprob_gap(self) -> float:
        """The largest difference between what the engine says of its own tokens and what the network says."""
        gaps = []
        for kind, sample in (("whole", self.whole), ("cut", self.cut)):
            said = np.array([response["logprobs"] for response in self._facts[kind]]).ravel()
            gaps.append(np.abs(said - np.log(sample.probable[np.arange(len(said)), sample.ids])).max())
        return float(max(gaps))

    def trainers_gap(self, **sampling: Any) -> float:
        """What the trainer reports as the mean gap to the workers' logprobs, over responses with `MIN_TOKENS`."""
        return self._gap("held", Sampling(**sampling))

    def varied_gap(self) -> float:
        """The same over responses that were sampled in ways of their own."""
        return self._gap("varied", Sampling())

    def _gap(self, kind: str, sampling: Sampling) -> float:
        from ebbtide.trainer.learning.learner import Learner, LearnerSettings
        from ebbtide.trainer.learning.training_batches import TrainingSample

        samples = []
        for response in self._facts[kind]:
            count = len(response["ids"])
            ids = np.array([*self._facts["prompt"], *response["ids"]])
            said, versions = np.array(response["logprobs"], np.float32), np.zeros(count, np.int64)
            own = Sampling(**response["sampling"]) if "sampling" in response else None
            responses = (SampledResponse(start=0, end=count, sampling=own),) if own else ()
            samples.append(TrainingSample(ids, np.ones(count, np.bool_), said, versions, 1.0, responses))
        learner = Learner(load(self._checkpoint), LearnerSettings(sampling=sampling), version=0)
        gap = learner.step(samples, Random(0)).logprob_gap
        assert gap is not None
        return gap


@pytest.fixture(
    scope="module",
    params=[
        ("off", *FAST),
        ("grouped", *FAST),
        pytest.param(("off", *NIGHTLY), marks=pytest.mark.nightly),
        pytest.param(("grouped", *NIGHTLY), marks=pytest.mark.nightly),
    ],
    ids=["fast", "fast drafted", "full", "full drafted"],
)
def samples(request: pytest.FixtureRequest, make_checkpoint: Callable[..., Path]) -> Samples:
    return Samples(make_checkpoint(4, vocab_size=VOCABULARY), *request.param)


def test_tokens_behind_cuts_have_the_networks_distribution(samples: Samples) -> None:
    assert len(samples.behind.ids) > len(samples.cut.ids) / 10
    assert samples.behind.chance() > ALPHA
    assert samples.cut.chance() > ALPHA


def test_where_tokens_are_drafted_many_of_them_are_accepted(samples: Samples) -> None:
    assert bool(samples.drafts) == samples.speculates
    if samples.speculates:
        assert samples.drafts["accepted"] > len(samples.cut.ids) / 20


def test_tokens_with_and_without_cuts_have_one_distribution(samples: Samples) -> None:
    assert samples.whole.chance() > ALPHA
    (cut, of_cut), (whole, of_whole) = samples.cut.deviation(), samples.whole.deviation()
    assert chance(cut - whole, of_cut + of_whole) > ALPHA


def test_a_shift_of_one_percent_would_be_seen(samples: Samples) -> None:
    random = np.random.default_rng(0)
    seen = [samples.cut.shifted(random).chance() <= ALPHA for _ in range(100)]
    assert sum(seen) >= 95


def test_the_trainer_bars_end_tokens_where_engines_did(samples: Samples) -> None:
    gap = samples.trainers_gap(min_tokens=exact_samples.MIN_TOKENS, stop_token_ids=(exact_samples.END,))
    assert gap <= within(1e-4)
    assert samples.trainers_gap() > 0.01, "the end token is a likely one"


def test_the_trainer_finds_the_logprobs_of_each_response_as_it_was_sampled(samples: Samples) -> None:
    assert samples.varied_gap() <= within(1e-5)


def test_engines_say_the_networks_logprobs_of_what_they_sampled(samples: Samples) -> None:
    assert samples.logprob_gap() <= within(1e-3)
