"""Without parsers, a response is its text."""

from ebbtide.gateway.parsers import ParserNames, call_id, load_output_parsers
from tests.fakes.model_texts import byte_level_tokenizer


def test_a_model_without_parsers_needs_no_vllm() -> None:
    assert load_output_parsers(byte_level_tokenizer(), ParserNames()) is None


def test_ids_of_calls_follow_from_the_response_and_their_number() -> None:
    assert call_id("q", 0) == call_id("q", 0)
    assert len({call_id("q", 0), call_id("q", 1), call_id("r", 0)}) == 3
