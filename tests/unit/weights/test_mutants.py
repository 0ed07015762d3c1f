"""Ten thousand mutants of manifests, patches and blobs."""

import random
from functools import partial

import pytest

from benchmarks import mutants
from benchmarks.forging import forged_patch
from benchmarks.mutants import make_sample, offer
from ebbtide.types.weights import Manifest, Patch


def test_no_mutant_is_accepted_crashes_a_reader_or_makes_it_allocate() -> None:
    verdict = offer(10_000)
    assert verdict.tried == 10_000
    assert verdict.accepted == []
    assert verdict.crashed == []
    assert len(verdict.refused) == 7
    assert verdict.peak_bytes < 4 << 20
    assert 100 < verdict.allowed < 500  # lies that blobs tell: a fifth of a seventh


def test_a_reader_that_lets_forged_patches_pass_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def trust(patch: Patch, target: Manifest) -> None:
        """Look at nothing."""

    monkeypatch.setattr(mutants, "check_patch", trust)
    verdict = offer(700)
    assert verdict.accepted.count("patch forged") > 20


def test_the_forger_tells_every_lie_of_his() -> None:
    sample = make_sample()
    forge = partial(forged_patch, sample.patch, random.Random(1))
    lies = [forge() for _ in range(2000)]
    assert len({lie.root for lie, _ in lies if lie.root != sample.patch.root}) > 300
    assert {forbidden for _, forbidden in lies} == {False, True}
    assert {lie.run_id for lie, forbidden in lies if forbidden} == {"run", "other"}
    assert all(len(lie.signature) == 0 for lie, forbidden in lies if not forbidden)
    assert sum(entry.full != () for entry in sample.manifest.tensors) == 2
