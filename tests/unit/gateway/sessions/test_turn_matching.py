"""What a model sampled is never encoded again where a client sends it back, and nothing is guessed."""

import json

import pytest

from ebbtide.gateway.sessions.turns import PromptOrigin
from ebbtide.gateway.templates import TemplateSandbox
from ebbtide.types.tokens import unpack_ids
from tests.fakes.played_sessions import (
    ALTERS_EARLIER,
    CALL,
    CHATML,
    STRIPS_REASONING,
    TOOLS,
    WITHOUT_ENDS,
    WRITES_CALLS,
    assert_exact,
    played,
    rendered,
    user,
)

KINDS = ("byte-level", "fallback", "characters")


@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_that_comes_back_is_the_ids_that_were_sampled(kind: str, sandbox: TemplateSandbox) -> None:
    session = played(sandbox, kind=kind)
    chat = [user()]
    for number in range(4):
        chat += session.ask(chat, f"the answer {number} is the dog")
        chat.append(user(f"and {number}?"))
    assert [one.record.origin for one in session.plans] == [PromptOrigin.FIRST] + 3 * [PromptOrigin.CONTINUED]
    trace = assert_exact(session)
    (branch,) = trace.branches
    assert (trace.unmatched, trace.unknown, branch.turns) == (0, 0, (1, 2, 3, 4))
    last = session.plans[-1].prompt_ids
    assert session.text.decode(last, skip_special=False) == rendered(session, chat[:-2])
    if kind != "characters":  # the odd cuts are kept
        assert last != session.text.encode(rendered(session, chat[:-2]), special=False)


def test_a_turn_that_was_cut_is_ended_by_a_token_that_counts_as_written(sandbox: TemplateSandbox) -> None:
    session = played(sandbox)
    chat = [user(), *session.ask([user()], "the dog is", ended=False), user("go on")]
    session.ask(chat, "ok")
    first, second = session.plans
    sampled = len(session.ledger["q-1-0"].tokens)
    assert second.record.repeated == len(first.prompt_ids) + sampled
    assert second.prompt_ids[second.record.repeated] == session.text.eos_ids[0]
    (branch,) = assert_exact(session).branches
    assert branch.loss_mask[: sampled + 1].tolist() == [1] * sampled + [0]


def test_a_template_without_end_tokens_is_continued(sandbox: TemplateSandbox) -> None:
    session = played(sandbox, WITHOUT_ENDS)
    chat = [user(), *session.ask([user()], "the dog", ended=False), user("and")]
    session.ask(chat, "ok", ended=False)
    assert session.plans[1].record.repeated == len(session.plans[0].prompt_ids) + len(session.ledger["q-1-0"].tokens)
    assert session.text.decode(session.plans[1].prompt_ids, skip_special=False) == rendered(session, chat)
    assert len(assert_exact(session).branches) == 1


def test_tool_calls_stay_as_sampled_however_the_template_spells_them(sandbox: TemplateSandbox) -> None:
    session = played(sandbox, WRITES_CALLS)
    (answer,) = session.ask([user()], f"I look.\n{CALL}", tools=TOOLS)
    assert json.loads(answer["tool_calls"][0]["function"]["arguments"])["x"] == {"z": 1.0, "a": None}
    # The client rewrites ids and arguments, and adds empty fields.
    function = {"name": "search", "arguments": '{"x": {"a": null, "z": 1}, "q": "a b", "n": [1, 2]}'}
    back = {
        **answer,
        "refusal": None,
        "annotations": [],
        "tool_calls": [{"id": "other", "type": "function", "function": function}],
    }
    session.ask([user(), back, {"role": "tool", "tool_call_id": "other", "content": "42"}], "It is 42.", tools=TOOLS)
    assert session.plans[1].record.origin is PromptOrigin.CONTINUED
    trace = assert_exact(session)
    assert (len(trace.branches), trace.unmatched) == (1, 0)


def test_other_arguments_are_another_history(sandbox: TemplateSandbox) -> None:
    session = played(sandbox, WRITES_CALLS)
    (answer,) = session.ask([user()], CALL, tools=TOOLS)
    answer["tool_calls"][0]["function"]["arguments"] = '{"q": "another"}'
    session.ask([user(), answer, user()], "ok", tools=TOOLS)
    trace = assert_exact(session)
    assert session.plans[1].record.origin is PromptOrigin.TEXT  # of the first prompt
    assert (len(trace.branches), trace.unmatched, trace.unknown) == (2, 0, 1)


def test_other_tools_make_another_prompt(sandbox: TemplateSandbox) -> None:
    session = played(sandbox, WRITES_CALLS)
    (answer,) = session.ask([user()], "ok", tools=TOOLS)
    chat, other = [user(), answer, user()], [{**TOOLS[0], "x": 1}]
    session.ask(chat, "ok", tools=other)
    assert session.plans[1].prompt_ids == session.text.encode(rendered(session, chat, tools=other), special=False)
    trace = assert_exact(session)
    assert (len(trace.branches), trace.unmatched) == (2, len(session.ledger["q-1-0"].tokens))


def test_reasoning_that_the_template_leaves_out_is_counted_and_trained_where_it_was_sampled(
    sandbox: TemplateSandbox,
) -> None:
    session = played(sandbox, STRIPS_REASONING)
    (answer,) = session.ask([user()], "<think>the fox</think>the dog")
    chat = [user(), answer, user("again")]
    session.ask(chat, "<think>well</think>yes")
    second = session.plans[1]
    assert session.text.decode(second.prompt_ids, skip_special=False) == rendered(session, chat)
    assert "fox" not in rendered(session, chat)
    trace = assert_exact(session)
    assert (len(trace.branches), trace.unmatched) == (2, len(session.ledger["q-1-0"].tokens))


def test_reasoning_that_the_template_keeps_in_a_loop_of_tools_is_continued(sandbox: TemplateSandbox) -> None:
    session = played(sandbox, STRIPS_REASONING)
    (answer,) = session.ask([user()], "<think>the fox</think>the dog")
    session.ask([user(), answer, {"role": "tool", "content": "42"}], "<think>so</think>42")
    assert session.plans[1].record.origin is PromptOrigin.CONTINUED
    assert len(assert_exact(session).branches) == 1


def test_a_client_that_drops_the_reasoning_gets_the_prompt_that_it_asked_for(sandbox: TemplateSandbox) -> None:
    session = played(sandbox, STRIPS_REASONING)
    (answer,) = session.ask([user()], "<think>the fox</think>the dog")
    del answer["reasoning"]
    chat = [user(), answer, {"role": "tool", "content": "42"}]
    session.ask(chat, "ok")
    assert session.text.decode(session.plans[1].prompt_ids, skip_special=False) == rendered(session, chat)
    trace = assert_exact(session)
    assert (len(trace.branches), trace.unmatched) == (2, len(session.ledger["q-1-0"].tokens))


def test_a_client_that_drops_reasoning_which_no_template_renders_goes_on_with_what_was_sampled(
    sandbox: TemplateSandbox,
) -> None:
    """The reasoning is in the prompt already, as a template's opening of the response ended it."""
    opening = CHATML.replace("assistant\n{% endif %}", "assistant\n<think>\n\n</think>{% endif %}").replace(
        "{{ s + m.role + '\n' +", "{{ s + m.role + '\n' + ('<think>\n\n</think>' if m.role == 'assistant' else '') +"
    )
    session = played(sandbox, opening)
    (answer,) = session.ask([user()], "the dog")
    answer["reasoning_content"] = "\n\n"
    session.book.set_answer("q-1-0", answer)
    session.ask([user(), {"role": "assistant", "content": "the dog"}, user()], "ok")
    assert session.plans[1].record.origin is PromptOrigin.CONTINUED
    assert len(assert_exact(session).branches) == 1


@pytest.mark.parametrize("content", ["m.content | upper", "m.content[:3]", "m.content + ' (edited)'"])
def test_an_answer_that_the_template_rewrites_is_rendered_as_it_writes_it(
    content: str, sandbox: TemplateSandbox
) -> None:
    session = played(sandbox, CHATML.replace("m.content", f"({content} if m.role == 'assistant' else m.content)"))
    chat = [user(), *session.ask([user()], "the dog"), user("more")]
    session.ask(chat, "ok")
    assert session.text.decode(session.plans[1].prompt_ids, skip_special=False) == rendered(session, chat)
    trace = assert_exact(session)
    assert len(trace.branches) == 2
    assert trace.unmatched > 0


def test_an_answer_that_is_the_beginning_of_another_is_not_cut_out_of_it(sandbox: TemplateSandbox) -> None:
    session = played(sandbox)
    for ended in (True, False):
        session.ask([user()], "the do", ended=ended)
    chat = [user(), {"role": "assistant", "content": "the dogs"}, user()]
    plan = session.book.plan_chat(chat, tools=None, template_options=session.options)
    first = session.plans[0].prompt_ids
    rest = session.text.render(chat, tools=None, template_options=session.options)
    rest = rest.removeprefix(session.text.decode(first, skip_special=False))
    assert plan.prompt_ids == [*first, *session.text.encode_following(rest, first[-1])]
    assert plan.record.unknown == 1


def test_a_prompt_of_the_same_length_is_not_the_same(sandbox: TemplateSandbox) -> None:
    session = played(sandbox, WRITES_CALLS)
    (answer,) = session.ask([user()], "ok", tools=[{**TOOLS[0], "x": 1}])
    chat, other = [user(), answer, user()], [{**TOOLS[0], "x": 2}]
    session.ask(chat, "ok", tools=other)
    assert session.text.decode(session.plans[1].prompt_ids, skip_special=False) == rendered(session, chat, tools=other)
    assert len(assert_exact(session).branches) == 2


def test_a_template_that_alters_earlier_messages_makes_branches(sandbox: TemplateSandbox) -> None:
    session, chat = played(sandbox, ALTERS_EARLIER), [user("a long question")]
    for _ in range(3):
        chat += [*session.ask(chat, "a long answer"), user("another question")]
        assert session.text.decode(session.plans[-1].prompt_ids, skip_special=False) == rendered(session, chat[:-2])
    trace = assert_exact(session)
    assert len(trace.branches) > 1
    assert trace.unmatched > 0


@pytest.mark.parametrize("kind", KINDS)
def test_raw_text_continues_what_was_sampled(kind: str, sandbox: TemplateSandbox) -> None:
    session = played(sandbox, kind=kind)
    session.submit(session.book.plan_text("Once upon"), " a time the dog")
    plan = session.book.plan_text("Once upon a time the dog sleeps on")
    assert plan.record.origin is PromptOrigin.TEXT
    sampled = session.ledger["q-1-0"]
    before = [*sampled.prompt_ids, *sampled.tokens["id"][:-1].tolist()]  # all but the end, which the text has not
    assert plan.prompt_ids[: len(before)] == before
    assert session.text.decode(plan.prompt_ids, skip_special=False) == "Once upon a time the dog sleeps on"
    session.submit(plan, ".", ended=False)
    assert_exact(session)


def test_a_chat_that_reads_like_a_raw_text_is_not_taken_for_it(sandbox: TemplateSandbox) -> None:
    session = played(sandbox, "{{ messages[0].content }}")
    session.submit(session.book.plan_text("Hello"), "x")
    session.ask([user("Hello")], "y")
    assert session.plans[1].record.origin is not PromptOrigin.TEXT
    assert_exact(session)


def test_prompts_of_ids_stay_as_they_are_and_share_what_they_begin_with(sandbox: TemplateSandbox) -> None:
    session = played(sandbox)
    session.submit(session.book.plan_ids([5, 6, 7]), "the dog")
    sampled = session.ledger["q-1-0"].tokens["id"].tolist()
    for ids in ([5, 6, 7, *sampled, 9], [5, 6, 7, *sampled[:2], 9], [5, 8], [9]):
        plan = session.book.plan_ids(ids)
        assert plan.prompt_ids == ids
        shared = [5, 6, 7, *sampled]
        length = next((at for at, one in enumerate(ids) if at >= len(shared) or one != shared[at]), len(ids))
        assert (plan.record.repeated, unpack_ids(plan.record.added).tolist()) == (length, ids[length:])
        session.submit(plan, "x")
    assert len(assert_exact(session).branches) == 4
