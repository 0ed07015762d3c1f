"""Ten thousand mutants of manifests, patches and blobs."""

from benchmarks.mutants import offer


def test_no_mutant_is_accepted_crashes_a_reader_or_makes_it_allocate() -> None:
    verdict = offer(10_000)
    assert verdict.tried == 10_000
    assert verdict.accepted == []
    assert verdict.crashed == []
    assert len(verdict.refused) == 7
    assert verdict.peak_bytes < 4 << 20
