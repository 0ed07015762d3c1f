"""A real engine with memory for a part of its rollouts preempts none of them if the worker admits by memory."""

import pytest

from benchmarks.long_tail.admission.admission_part import work_facts
from benchmarks.long_tail.admission.admitted_work import drawn_work


@pytest.mark.timeout(300)
def test_admission_by_memory_spares_a_real_engine_its_preemptions_and_makes_no_token_twice() -> None:
    work = drawn_work(0, 8)
    found = {one["arrangement"]: one for one in work_facts([work])["works"]}
    assert found["none"]["preemptions"] > 5
    for name in ("chunks", "forecasts"):
        assert 10 * found[name]["preemptions"] <= found["none"]["preemptions"]  # a starved worker hears too late
        assert found[name]["made"] == sum(item.length for item in work)
        assert found[name]["read_again"] < 0.5 * found[name]["made"]  # in so short a work a few parkings are a fifth
