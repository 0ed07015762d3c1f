"""Messages become ids by the model's own template, within limits that nothing exceeds."""

import os
import random
import signal
import socket
import struct
import threading
from pathlib import Path
from typing import Any

import pytest

from ebbtide.errors import InvalidRequest, Unavailable
from ebbtide.gateway.model import ServedModel
from ebbtide.gateway.parsers import ParserNames
from ebbtide.gateway.templates import TemplateLimits, TemplateSandbox
from ebbtide.local_cluster import serving_checkpoint
from ebbtide.local_cluster.serving_checkpoint import ServedNetwork
from ebbtide.trainer.base_model.base_model import character_tokenizer
from tests.fakes.model_texts import (
    END,
    START,
    byte_level_tokenizer,
    fallback_tokenizer,
    random_text,
    served_model,
    tokenizers,
)

USER = [{"role": "user", "content": "Hello"}]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "a": {"b": "ü<"}}}}]


def rendered(
    sandbox: TemplateSandbox, template: str, messages: list[dict[str, Any]] | None = None, **options: Any
) -> str:
    text = served_model(byte_level_tokenizer(), sandbox, template=template)
    return text.render(messages or USER, tools=options.pop("tools", None), template_options=options)


def test_a_model_folder_brings_tokenizer_template_and_end_tokens(tmp_path: Path, sandbox: TemplateSandbox) -> None:
    network = ServedNetwork(hidden=64, layers=1, heads=2, kv_heads=1, head=32, feed_forward=64)
    folder = serving_checkpoint.served_model(tmp_path, network)
    text = ServedModel.load(folder, sandbox, ParserNames())
    prompt = text.render(USER, tools=None, template_options={})
    ids = text.encode(prompt, special=False)
    theirs = text.tokenizer.apply_chat_template(USER, tokenize=False, add_generation_prompt=True)
    assert prompt == theirs
    assert ids == text.tokenizer.encode(theirs, add_special_tokens=False)
    assert text.eos_ids == (text.tokenizer.eos_token_id,)
    assert max(ids) < text.vocabulary


def test_a_folder_with_a_broken_tokenizer_is_refused_by_name(tmp_path: Path, sandbox: TemplateSandbox) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(InvalidRequest, match=r"^model: no tokenizer can be loaded") as refused:
        ServedModel.load(tmp_path, sandbox, ParserNames())
    assert refused.value.field == "model"


def test_the_demos_template_is_rendered_as_its_tokenizer_renders_it(sandbox: TemplateSandbox) -> None:
    tokenizer = character_tokenizer()
    chat = [*USER, {"role": "assistant", "content": "olleH"}, {"role": "user", "content": "again"}]
    for generate in (True, False):
        ours = served_model(tokenizer, sandbox).render(chat, tools=None, template_options={}, generate=generate)
        assert ours == tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=generate)


def test_templates_meet_the_conventions_that_they_are_written_for(sandbox: TemplateSandbox) -> None:
    template = (
        "{%- for one in messages %}\n  {%- if one.content == 'skip' %}{% continue %}{% endif %}\n"
        "{{ one.role }}={% generation %}{{ one.content }}{% endgeneration %};\n{%- endfor %}"
        "{{ eos_token }}{{ tools | tojson }}{{ style }}{{ strftime_now('%Y') | length }}"
    )
    tokenizer = byte_level_tokenizer()
    chat = [*USER, {"role": "user", "content": "skip"}]
    ours = rendered(sandbox, template, chat, tools=TOOLS, style="x")
    theirs = tokenizer.apply_chat_template(
        chat, chat_template=template, tools=TOOLS, style="x", tokenize=False, add_generation_prompt=True
    )
    assert ours == theirs
    assert "ü<" in ours


def test_a_model_with_several_templates_uses_the_one_for_tools(sandbox: TemplateSandbox) -> None:
    tokenizer = byte_level_tokenizer()
    text = served_model(tokenizer, sandbox, template={"default": "plain", "tool_use": "tools"})  # type: ignore[arg-type]
    assert text.render(USER, tools=None, template_options={}) == "plain"
    assert text.render(USER, tools=TOOLS, template_options={}) == "tools"


def test_messages_arrive_as_templates_expect_them(sandbox: TemplateSandbox) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": [1, 2]}'}}
    chat: list[dict[str, Any]] = [
        {"role": "user", "content": "a\nb", "name": None},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "assistant", "content": "x", "tool_calls": [], "reasoning": "r"},
    ]
    template = (
        "{% for m in messages %}{{ m.content }}|{{ m.reasoning_content }}"
        "{{ m.name is defined }}|{{ m.tool_calls is defined }}|"
        "{% for c in m.tool_calls %}{{ c.function.arguments.a[1] }}{% endfor %};{% endfor %}"
    )
    assert rendered(sandbox, template, chat) == "a\nb|False|False|;|False|True|2;x|rFalse|False|;"


def test_messages_that_are_no_text_are_refused(sandbox: TemplateSandbox) -> None:
    with pytest.raises(InvalidRequest) as refused:
        rendered(sandbox, "{{ messages[0].content }}", [{"role": "user", "content": "\ud800"}])
    assert refused.value.field == "messages"


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content.nothing.at_all }}", "has no attribute"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{% set _ = messages.append(1) %}", "is unsafe"),
        ("{% for i in range(10**9) %}x{% endfor %}", "Range too big"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "nested too deeply"),
        ("{{ 'x' * 10**12 }}", "too much memory"),
        ("{{ '%1000000000000d' % 1 }}", "refuses them"),
    ],
)
def test_a_template_that_fails_or_reaches_out_is_refused(template: str, said: str, sandbox: TemplateSandbox) -> None:
    with pytest.raises(InvalidRequest, match=said) as refused:
        rendered(sandbox, template)
    assert refused.value.field == "messages"


def test_a_template_that_does_not_compile_is_the_models_fault(sandbox: TemplateSandbox) -> None:
    for _ in range(2):  # the process keeps no half-known template
        with pytest.raises(InvalidRequest, match="does not compile") as refused:
            rendered(sandbox, "{% for %}")
        assert refused.value.field == "model"


def test_arguments_of_any_size_are_rendered(sandbox: TemplateSandbox) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": f'{{"a": {10**30}}}'}}
    chat = [{"role": "assistant", "content": "", "tool_calls": [call]}]
    assert (
        rendered(sandbox, "{{ messages[0].tool_calls[0].function.arguments | tojson }}", chat) == f'{{"a": {10**30}}}'
    )


def test_text_that_is_no_unicode_is_refused(sandbox: TemplateSandbox) -> None:
    with pytest.raises(InvalidRequest, match=r"^prompt: is no valid text"):
        served_model(byte_level_tokenizer(), sandbox).encode("\ud800", special=False)


def test_options_cannot_replace_messages(sandbox: TemplateSandbox) -> None:
    with pytest.raises(InvalidRequest, match=r"^chat_template_kwargs: tools"):
        served_model(byte_level_tokenizer(), sandbox, template="x").render(
            USER, tools=None, template_options={"tools": 1}
        )


LIMITED = TemplateLimits(cpu_s=0.2, text_chars=100_000, memory_bytes=512 << 20)


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{% for i in range(10**5) %}{% for j in range(10**5) %}{% endfor %}{% endfor %}", "0.2 s of processor time"),
        ("{% set n = 9 ** (9 ** 9) %}", "0.2 s of processor time"),
        ("{% for i in range(10**5) %}{{ messages }}{% endfor %}", "more than 100000 characters"),
    ],
)
def test_a_template_that_explodes_ends_at_its_limit_and_the_next_is_rendered(template: str, said: str) -> None:
    limited = TemplateSandbox(processes=1, limits=LIMITED)
    try:
        with pytest.raises(InvalidRequest, match=said):
            rendered(limited, template)
        assert rendered(limited, "{{ messages[0].content }}") == "Hello"
    finally:
        limited.close()


def test_a_schema_that_a_template_walks_too_often_ends_at_the_limit() -> None:
    """Each level of the schema is walked twice: as many steps as 2 to the power of its depth."""
    walk = "{% macro w(s) %}{% if s.p is defined %}{{ w(s.p) }}{{ w(s.p) }}{% endif %}{% endmacro %}{{ w(tools[0]) }}"
    schema: dict[str, Any] = {}
    for _ in range(60):
        schema = {"p": schema}
    limited = TemplateSandbox(processes=1, limits=LIMITED)
    try:
        with pytest.raises(InvalidRequest, match=r"0\.2 s of processor time"):
            rendered(limited, walk, tools=[schema])
    finally:
        limited.close()


def test_a_schema_that_is_nested_too_deeply_is_refused(sandbox: TemplateSandbox) -> None:
    schema: dict[str, Any] = {}
    for _ in range(100_000):
        schema = {"p": schema}
    with pytest.raises(InvalidRequest, match=r"^messages:"):
        rendered(sandbox, "{{ tools | tojson }}", tools=[schema])


def test_other_threads_go_on_while_a_template_explodes() -> None:
    limited = TemplateSandbox(processes=1, limits=LIMITED)
    forever = "{% for i in range(10**5) %}{% for j in range(10**5) %}{% endfor %}{% endfor %}"
    ended = threading.Event()

    def explode() -> None:
        with pytest.raises(InvalidRequest):
            rendered(limited, forever)
        ended.set()

    thread, steps = threading.Thread(target=explode), 0
    thread.start()
    while not ended.wait(0.001) and steps < 100_000:
        steps += 1
    thread.join()
    limited.close()
    assert steps > 10  # this thread ran while the other waited


@pytest.mark.parametrize("content", ["x", "x" * (2 << 20)], ids=["that answers nothing", "that reads nothing"])
def test_a_process_that_is_silent_is_ended_and_the_next_renders(content: str) -> None:
    own = TemplateSandbox(processes=1)
    assert rendered(own, "a") == "a"
    (process,) = own._idle.queue
    assert process._process is not None
    assert process._connection is not None
    with socket.socket(fileno=os.dup(process._connection.fileno())) as same:
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            assert struct.unpack("@ll", same.getsockopt(socket.SOL_SOCKET, option, 16)) == (30, 0)
            same.setsockopt(socket.SOL_SOCKET, option, struct.pack("@ll", 0, 100_000))
    process._process.send_signal(signal.SIGSTOP)
    with pytest.raises(Unavailable, match="try again"):
        rendered(own, "b", [{"role": "user", "content": content}])
    assert rendered(own, "c") == "c"
    own.close()


def test_a_process_that_was_killed_is_started_again(sandbox: TemplateSandbox) -> None:
    own = TemplateSandbox(processes=1)
    assert rendered(own, "a") == "a"
    (process,) = own._idle.queue
    assert process._process is not None
    process._process.kill()
    process._process.wait()
    assert rendered(own, "b") == "b"
    own.close()


def test_processes_end_with_the_sandbox() -> None:
    own = TemplateSandbox(processes=2)
    assert rendered(own, "a") == "a"
    started = [one._process for one in own._idle.queue if one._process is not None]
    assert len(started) == 1  # the second was not needed
    own.close()
    assert started[0].poll() == 0


@pytest.mark.parametrize("kind", ["byte-level", "fallback", "characters"])
def test_texts_are_encoded_as_their_tokenizer_encodes_them(kind: str, sandbox: TemplateSandbox) -> None:
    tokenizer, draw = tokenizers()[kind], random.Random(3)
    text = served_model(tokenizer, sandbox)
    for _ in range(50):
        words = random_text(draw, 20)
        for special in (True, False):
            assert text.encode(words, special=special) == tokenizer.encode(words, add_special_tokens=special)


def test_text_that_follows_gets_no_space_before_it(sandbox: TemplateSandbox) -> None:
    text = served_model(fallback_tokenizer(), sandbox)
    hello = text.encode("Hello", special=False)
    assert text.decode([*hello, *text.encode("dog", special=False)], skip_special=False) == "Hello dog"
    for following in ("dog", " dog", "\ndog", f"{END}\n{START}user\n", "漢"):
        ids = [*hello, *text.encode_following(following, hello[-1])]
        assert text.decode(ids, skip_special=False) == text.decode(
            text.encode("Hello" + following, special=False), skip_special=False
        )
    end = text.encode(END, special=False)
    assert [*end, *text.encode_following("dog", end[-1])] == text.encode(END + "dog", special=False)
    byte_level = served_model(byte_level_tokenizer(), sandbox)
    for following in ("dog", " dog", f"{END}\n{START}user\n", ""):
        assert byte_level.encode_following(following, 5) == byte_level.encode(following, special=False)


def test_many_threads_share_one_model(sandbox: TemplateSandbox) -> None:
    text = served_model(byte_level_tokenizer(), sandbox, template="{{ messages[0].content }}")
    wrong: list[str] = []

    def ask(number: int) -> None:
        for turn in range(20):
            words = f"the dog {number} {turn}"
            prompt = text.render([{"role": "user", "content": words}], tools=None, template_options={})
            if prompt != words or text.decode(text.encode(prompt, special=False), skip_special=False) != words:
                wrong.append(words)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_template_is_known_however_many_others_were_rendered_since() -> None:
    own = TemplateSandbox(processes=1)
    try:
        for _ in range(2):
            for number in range(70):  # more than a process keeps
                assert own.render(f"{number}: {{{{ x }}}}", {"x": "text"}) == f"{number}: text"
    finally:
        own.close()
