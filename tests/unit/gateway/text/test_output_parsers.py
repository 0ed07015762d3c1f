"""Without parsers, a response is its text."""

from ebbtide.gateway.text.output_parsers import OutputDelta, ParserNames, call_id, load_output_parsers
from tests.fakes.model_texts import byte_level_tokenizer


def test_without_parsers_all_text_is_content() -> None:
    parsers = load_output_parsers(byte_level_tokenizer(), ParserNames())
    made = parsers.parser(tools=None, tool_choice="auto", template_options={}, prompt_ids=[], call_seed="q")
    assert made.skip_special
    assert made.push("<think>", [1]) == OutputDelta(content="<think>")
    assert made.end() == OutputDelta()
    assert made.whole("all", [1]) == OutputDelta(content="all")


def test_ids_of_calls_follow_from_the_response_and_their_number() -> None:
    assert call_id("q", 0) == call_id("q", 0)
    assert len({call_id("q", 0), call_id("q", 1), call_id("r", 0)}) == 3
