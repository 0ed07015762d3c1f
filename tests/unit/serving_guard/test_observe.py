"""The engine's metrics are read."""

from math import inf

import pytest

from ebbtide.serving_guard.metrics_observer import between, parsed

TEXT = b"""# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 2.0
vllm:num_requests_running{engine="1",model_name="m"} 1.0
vllm:num_requests_waiting{engine="0",model_name="m"} 4.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="x"} 9.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:request_success_total{engine="0",finished_reason="stop",model_name="m"} 1e+02
vllm:request_success_total{engine="0",finished_reason="abort",model_name="m"} 3.0
vllm:time_to_first_token_seconds_bucket{engine="0",le="0.1",model_name="m"} 5.0
vllm:time_to_first_token_seconds_bucket{engine="0",le="+Inf",model_name="m"} 7.0
vllm:time_to_first_token_seconds_sum{engine="0",model_name="m"} 1.5
"""


def test_requests_are_summed_over_engines_and_metrics_with_like_names_ignored() -> None:
    sample = parsed(TEXT)
    assert (sample.inside, sample.waiting) == (7, 4)
    assert (sample.ended, sample.failed, sample.kv_usage) == (103, 3, 0.25)
    assert sample.histograms == {"vllm:time_to_first_token_seconds": {0.1: 5.0, inf: 7.0}}


@pytest.mark.parametrize("text", [b"", b"<html>", b"vllm:num_requests_running 1", b"vllm:num_requests_running x"])
def test_an_answer_without_the_number_of_requests_is_refused(text: bytes) -> None:
    with pytest.raises(ValueError, match=r"metrics|float"):
        parsed(text)


@pytest.mark.parametrize("value", [b"NaN", b"+Inf", b"-1"])
def test_an_answer_with_impossible_numbers_is_refused(value: bytes) -> None:
    for name in (b"num_requests_waiting", b"kv_cache_usage_perc", b"time_to_first_token_seconds_bucket"):
        with pytest.raises(ValueError, match=name.decode()):
            parsed(TEXT + b'vllm:%s{le="1"} %s\n' % (name, value))


def test_latencies_are_the_bounds_of_the_buckets_that_grew() -> None:
    before, after = {0.1: 5.0, 0.2: 6.0, inf: 6.0}, {0.1: 6.0, 0.2: 9.0, inf: 10.0}
    assert list(between(before, after)) == [0.1, 0.2, 0.2, 0.4]
    assert list(between(after, after)) == []
    assert list(between({}, {0.1: 1.0, inf: 1.0})) == [0.1]
