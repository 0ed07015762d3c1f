"""vLLM's parsers split responses, whole and as they come. The import of vLLM takes seconds, so it is no unit test."""

import json
import random
from typing import Any

import pytest

from ebbtide.demo.agents.number_agent import TOOLS as TOOLS_OF_AGENT
from ebbtide.demo.agents.number_problem import written_call
from ebbtide.errors import InvalidRequest
from ebbtide.gateway.model import ServedModel
from ebbtide.gateway.parsers import (
    OutputDelta,
    OutputParser,
    OutputParsers,
    ParserNames,
    ToolCallDelta,
    load_output_parsers,
)
from ebbtide.gateway.templates import TemplateSandbox
from ebbtide.trainer.base_model.base_model import character_tokenizer
from tests.fakes.model_texts import byte_level_tokenizer, served_model

# vLLM's and torch's own imports warn.
pytestmark = pytest.mark.filterwarnings("ignore")

TOOLS = [{"type": "function", "function": {"name": "search", "parameters": {"type": "object", "properties": {}}}}]
CALL = '<tool_call>\n{"name": "search", "arguments": {"query": "漢字 🎉", "days":3}}\n</tool_call>'
RESPONSES = [
    "plain content",
    "think about it</think>The answer is 42.",
    f"hm</think>Let me look.\n{CALL}",
    f"</think>{CALL}\n{CALL}",
    "cut within reasoning",
    'x</think>cut within a call <tool_call>\n{"name": "search", "arg',
]


@pytest.fixture(scope="module")
def model() -> ServedModel:
    return served_model(byte_level_tokenizer(), TemplateSandbox(processes=1))


@pytest.fixture(scope="module")
def parsers(model: ServedModel) -> OutputParsers:
    return loaded(model, ParserNames(tool="hermes", reasoning="deepseek_r1"))


def loaded(model: ServedModel, names: ParserNames) -> OutputParsers:
    made = load_output_parsers(model.tokenizer, names)
    assert made is not None
    return made


def parser(parsers: OutputParsers, seed: str = "q-1-0", **changes: Any) -> OutputParser:
    asked: dict[str, Any] = {"tools": TOOLS, "tool_choice": "auto", "template_options": {}, "prompt_ids": [1]}
    return parsers.parser(**{**asked, **changes}, call_seed=seed)


def test_the_vocabulary_is_read_once_for_all_parsers(model: ServedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    reads, kind = list[int](), type(model.tokenizer)
    read = kind.get_vocab

    def counted(tokenizer: Any) -> Any:
        reads.append(1)
        return read(tokenizer)

    monkeypatch.setattr(kind, "get_vocab", counted)
    made = loaded(model, ParserNames(tool="qwen3_xml", reasoning="qwen3"))
    before = len(reads)
    for number in range(5):
        parser(made, f"q-{number}").whole(RESPONSES[1], [1, 2])
        parser(made, f"q-{number}").push(RESPONSES[1], [1, 2])
    assert len(reads) == before


def streamed(model: ServedModel, made: OutputParser, text: str, draw: random.Random) -> OutputDelta:
    """Joins what the parser returns for pieces of one to five tokens."""
    ids, at, deltas = model.encode(text, special=False), 0, list[OutputDelta]()
    detokenizer = model.detokenizer([], skip_special=made.skip_special)
    while at < len(ids):
        step = draw.randint(1, 5)
        deltas.append(made.push(detokenizer.push(ids[at : at + step]), ids[at : at + step]))
        at += step
    deltas += [made.push(detokenizer.end(), []), made.end()]
    return joined(deltas)


def joined(deltas: list[OutputDelta]) -> OutputDelta:
    calls: dict[int, list[str]] = {}
    for delta in (call for one in deltas for call in one.tool_calls):
        call = calls.setdefault(delta.index, ["", "", ""])
        call[0] += delta.call_id
        call[1] += delta.name
        call[2] += delta.arguments
    return OutputDelta(
        "".join(one.reasoning for one in deltas),
        "".join(one.content for one in deltas),
        tuple(
            ToolCallDelta(index=number, call_id=one, name=name, arguments=rest)
            for number, (one, name, rest) in calls.items()
        ),
    )


def meaning(delta: OutputDelta) -> tuple[str, str, list[tuple[Any, ...]]]:
    """What must be the same: white space around content and in arguments is the parsers' affair."""
    calls = [(one.index, one.call_id, one.name, json.loads(one.arguments)) for one in delta.tool_calls]
    return delta.reasoning, delta.content.strip(), calls


@pytest.mark.parametrize("text", RESPONSES[:4])
def test_a_response_means_the_same_whole_and_streamed(text: str, model: ServedModel, parsers: OutputParsers) -> None:
    draw = random.Random(1)
    ids = model.encode(text, special=False)
    whole = meaning(parser(parsers).whole(text, ids))
    if "</think>" not in text:
        assert whole[:2] == (text, "")
    for _ in range(4):
        assert meaning(streamed(model, parser(parsers), text, draw)) == whole


@pytest.mark.parametrize("text", RESPONSES)
def test_streaming_fails_on_nothing(text: str, model: ServedModel, parsers: OutputParsers) -> None:
    made = streamed(model, parser(parsers), text, random.Random(2))
    assert made.reasoning or made.content or made.tool_calls


def test_calls_have_ids_that_another_gateway_gives_them_too(model: ServedModel, parsers: OutputParsers) -> None:
    text = RESPONSES[3]
    calls = [parser(parsers, seed).whole(text, []).tool_calls for seed in ("a", "a", "b")]
    ids = [[call.call_id for call in one] for one in calls]
    assert ids[0] == ids[1]
    assert len({*ids[0], *ids[2]}) == 4


def test_without_calls_wanted_their_text_is_content(model: ServedModel, parsers: OutputParsers) -> None:
    for changes in ({"tool_choice": "none"}, {"tools": None}):
        made = streamed(model, parser(parsers, **changes), RESPONSES[2], random.Random(3))
        assert not made.tool_calls
        assert CALL in made.content


def test_a_parser_that_fails_loses_no_text(model: ServedModel, parsers: OutputParsers) -> None:
    made = parser(parsers)
    first = made.push("a</think>b", model.encode("a</think>b", special=False))
    made._request = None  # whatever breaks in it
    assert made.push("rest", [1]).content == "rest"
    assert made.push(" and more", [1]).content == " and more"
    assert made.end() == OutputDelta()
    assert (first.reasoning, first.content) == ("a", "b")


@pytest.mark.parametrize(
    ("names", "field"),
    [
        (ParserNames(tool="nothing"), "tool_parser"),
        (ParserNames(reasoning="nothing"), "reasoning_parser"),
        (ParserNames(reasoning="mistral"), "reasoning_parser"),  # its marks are not in this tokenizer
    ],
)
def test_parsers_that_do_not_fit_are_refused_by_name(names: ParserNames, field: str, model: ServedModel) -> None:
    with pytest.raises(InvalidRequest) as refused:
        load_output_parsers(model.tokenizer, names)
    assert refused.value.field == field


def test_a_reasoning_parser_alone_leaves_calls_in_the_content(model: ServedModel) -> None:
    made = parser(loaded(model, ParserNames(reasoning="deepseek_r1"))).whole(RESPONSES[2], [])
    assert (made.reasoning, made.tool_calls) == ("hm", ())
    assert CALL in made.content


def test_a_call_that_the_demo_s_model_writes_comes_back_from_its_template_as_it_was_written() -> None:
    sandbox = TemplateSandbox(processes=1)
    written, model = written_call("biko"), served_model(character_tokenizer(), sandbox)
    parsers = loaded(model, ParserNames(tool="pythonic"))
    made = parser(parsers, tools=TOOLS_OF_AGENT).whole(written, model.encode(written, special=False))
    (call,) = made.tool_calls
    assert (made.content, call.name, json.loads(call.arguments)) == ("", "look", {"at": "biko"})
    function = {"name": call.name, "arguments": call.arguments}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "find toma"},
        {"role": "assistant", "tool_calls": [{"id": call.call_id, "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": call.call_id, "content": "is 407"},
    ]
    rendered = model.render(messages, tools=TOOLS_OF_AGENT, template_options={})
    assert rendered == f"<|user|>find toma<|assistant|>{written}<|end|><|user|>is 407<|assistant|>"
    sandbox.close()
