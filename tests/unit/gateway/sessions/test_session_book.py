"""Forks, retries, edits and compacted histories are branches, and any gateway knows them from what is stored."""

import pytest

from ebbtide.errors import Internal, InvalidRequest, NotReady
from ebbtide.gateway.sessions.book import SessionBook
from ebbtide.gateway.sessions.trace import session_trace
from ebbtide.gateway.templates import TemplateSandbox
from ebbtide.types.tokens import unpack_ids, unpack_tokens
from tests.fakes.played_sessions import (
    CALL,
    TOOLS,
    WRITES_CALLS,
    assert_exact,
    played,
    rendered,
    user,
)

KINDS = ("byte-level", "fallback", "characters")


def test_forks_share_what_was_sampled_before_them(sandbox: TemplateSandbox) -> None:
    session = played(sandbox)
    chat = [user(), *session.ask([user()], "the dog")]
    for question in ("one", "two", "three"):
        session.ask([*chat, user(question)], f"answer {question}")
    trace = assert_exact(session)
    assert [branch.turns for branch in trace.branches] == [(1, 2), (1, 3), (1, 4)]
    shared = len(session.ledger["q-1-0"].tokens)
    assert [int(branch.loss_mask[:shared].sum()) for branch in trace.branches] == [shared, 0, 0]
    assert all(branch.sampled[:shared].all() for branch in trace.branches)


def test_several_completions_of_one_turn_are_branches_and_any_is_continued(sandbox: TemplateSandbox) -> None:
    session = played(sandbox)
    answers = session.ask([user()], "the first", "the second", "the third")
    session.ask([user(), answers[1], user("why?")], "so")
    assert (session.plans[1].record.parent, session.plans[1].record.completion) == (1, 1)
    assert [branch.turns for branch in assert_exact(session).branches] == [(1,), (1,), (1, 2)]


def test_a_repeated_request_is_its_turn_and_a_resampled_prompt_a_branch(sandbox: TemplateSandbox) -> None:
    session = played(sandbox)
    session.ask([user()], "the dog")
    turn = session.book.turn_of("request 1")
    assert turn is not None
    assert session.book.add(1, turn.request_id, turn.rollout_ids, b"") is turn  # whatever is sent again
    assert session.book.turn_of("request 2") is None
    session.ask([user()], "the fox")
    assert session.plans[1].prompt_ids == session.plans[0].prompt_ids
    assert not session.plans[1].record.added
    assert len(assert_exact(session).branches) == 2


def test_an_edited_history_keeps_the_tokens_before_the_edit(sandbox: TemplateSandbox) -> None:
    session = played(sandbox)
    chat = [user("Hi"), *session.ask([user("Hi")], "the dog"), user("more")]
    chat += [*session.ask(chat, "the fox"), user("more")]
    edited = [*chat[:3], {"role": "assistant", "content": "the cat"}, user("more")]
    session.ask(edited, "ok")
    plan = session.plans[2]
    assert plan.prompt_ids[: len(session.plans[1].prompt_ids)] == session.plans[1].prompt_ids
    assert session.text.decode(plan.prompt_ids, skip_special=False) == rendered(session, edited)
    trace = assert_exact(session)
    assert (trace.unmatched, trace.unknown, len(trace.branches)) == (0, 1, 2)


def test_a_compacted_history_is_a_branch_whose_repeated_answers_are_counted(sandbox: TemplateSandbox) -> None:
    session = played(sandbox)
    chat = [user("Hi"), *session.ask([user("Hi")], "the dog"), user("more")]
    (second,) = session.ask(chat, "the fox")
    compacted = [user("So far: a dog."), second, user("go on")]
    session.ask(compacted, "ok")
    plan = session.plans[2]
    assert session.text.decode(plan.prompt_ids, skip_special=False) == rendered(session, compacted)
    trace = assert_exact(session)
    assert plan.record.unmatched == trace.unmatched == len(session.ledger["q-2-0"].tokens)
    assert [branch.turns[-1] for branch in trace.branches] == [2, 3]


def test_an_answer_that_its_client_interrupted_goes_on_as_text(sandbox: TemplateSandbox) -> None:
    session = played(sandbox)
    (answer,) = session.ask([user()], "the dog sleeps")
    answer["content"] = "the do"
    chat = [user(), answer, user("stop")]
    session.ask(chat, "ok")
    assert session.text.decode(session.plans[1].prompt_ids, skip_special=False) == rendered(session, chat)
    assert len(assert_exact(session).branches) == 2


def test_a_record_grows_with_its_turn_and_not_with_the_session(sandbox: TemplateSandbox) -> None:
    session, chat = played(sandbox), [user("a long question " * 50)]
    for _ in range(12):
        chat += [*session.ask(chat, "a long answer " * 20), user("next")]
    sizes = [len(record) for _, _, record in session.stored]
    assert max(sizes[1:]) < 300 < sizes[0]


def test_another_gateway_goes_on_where_the_first_ended(sandbox: TemplateSandbox) -> None:
    session = played(sandbox, WRITES_CALLS)
    chat = [user(), *session.ask([user()], f"I look.\n{CALL}", tools=TOOLS), user("more")]
    other = session.another_gateways_book()
    assert other.last == 1
    chat += [*session.ask(chat, "the fox", tools=TOOLS, book=other), user("and")]
    with pytest.raises(KeyError):
        session.book.prompt_ids(2)  # the first gateway has not read it yet
    session.read(session.book, 2)
    plans = [book.plan_chat(chat, tools=TOOLS, template_options=session.options) for book in (session.book, other)]
    assert plans[0] == plans[1]
    assert plans[0].record.parent == 2
    assert_exact(session)


def test_a_turn_is_added_behind_the_tokens_that_it_repeats(sandbox: TemplateSandbox) -> None:
    session = played(sandbox)
    chat = [user(), *session.ask([user()], "the dog"), user("more")]
    session.ask(chat, "ok")
    book = SessionBook(session.text)
    with pytest.raises(NotReady, match="turn 1"):
        book.add(2, *session.stored[1])
    book.add(1, *session.stored[0])
    assert book.needed(session.stored[1][2]) == "q-1-0"
    with pytest.raises(NotReady, match="q-1-0"):
        book.add(2, *session.stored[1])
    book.set_tokens("q-1-0", session.ledger["q-1-0"].tokens)
    book.add(2, *session.stored[1])
    assert book.prompt_ids(2) == session.plans[1].prompt_ids


def test_tokens_of_a_completion_only_grow(sandbox: TemplateSandbox) -> None:
    session = played(sandbox)
    session.ask([user()], "the dog")
    tokens = session.ledger["q-1-0"].tokens
    session.book.set_tokens("q-1-0", tokens[:1])
    assert len(session_trace(session.book).turns[0].completions[0].tokens) == len(tokens)


def test_a_record_that_is_none_is_refused(sandbox: TemplateSandbox) -> None:
    with pytest.raises(Internal, match="cannot be read"):
        SessionBook(played(sandbox).text).add(1, "r", ["q"], b"\xc1")


def test_a_branch_is_what_a_trajectory_holds(sandbox: TemplateSandbox) -> None:
    session = played(sandbox)
    session.ask([user(), *session.ask([user()], "the dog"), user()], "ok")
    (branch,) = session.trace().branches
    packed = branch.packed()
    assert unpack_ids(packed["prompt_ids"]).tolist() == session.plans[0].prompt_ids
    assert len(packed["loss_mask"]) == len(unpack_tokens(packed["tokens"])) == len(branch.tokens)
    assert packed["loss_mask"].count(1) == sum(len(one.tokens) for one in session.ledger.values())


def test_a_completion_without_tokens_is_no_branch(sandbox: TemplateSandbox) -> None:
    session = played(sandbox)
    session.ask([user()], "", ended=False)
    assert session.trace().branches == ()
    session.ask([user(), {"role": "assistant", "content": ""}, user("well?")], "ok")
    assert len(assert_exact(session).branches) == 1


def test_a_last_turn_without_tokens_takes_nothing_from_the_branch_that_it_follows(sandbox: TemplateSandbox) -> None:
    session, chat = played(sandbox), [user()]
    for _ in range(2):
        chat += [*session.ask(chat, "ok"), user()]
    whole = [branch.packed() for branch in session.trace().branches]
    for _ in range(2):  # the second repeats what the first has added
        session.ask(chat, "", ended=False)
        chat += [{"role": "assistant", "content": ""}, user("well?")]
        assert [branch.packed() for branch in assert_exact(session).branches] == whole
    session.ask(chat, "yes")
    assert len(assert_exact(session).branches) == 1


def test_answers_that_say_the_same_are_counted_where_they_stand(sandbox: TemplateSandbox) -> None:
    session, chat = played(sandbox), [user()]
    for _ in range(3):
        chat += [*session.ask(chat, "ok"), user()]
    assert [plan.record.unmatched for plan in session.plans] == [0, 0, 0]
    session.ask([user("other"), *chat[1:]], "ok")  # none of the three is in the context that it was sampled in
    assert session.plans[3].record.unmatched == sum(len(session.ledger[f"q-{one}-0"].tokens) for one in (1, 2, 3))


@pytest.mark.parametrize(
    "hostile", ["\ud800", '{"a":' * 900 + "1" + "}" * 900, "{" * 5000, "[" * 100_000, "<|im_end|>" * 100]
)
def test_hostile_texts_are_refused_or_known_and_break_nothing(hostile: str, sandbox: TemplateSandbox) -> None:
    session = played(sandbox, WRITES_CALLS)
    (answer,) = session.ask([user()], "ok")
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": hostile}}
    for back in ({"role": "assistant", "content": hostile}, {**answer, "tool_calls": [call]}):
        try:
            session.ask([user(), back, user()], "ok")
        except InvalidRequest as refused:
            assert refused.field == "messages"  # noqa: PT017
    try:
        session.submit(session.book.plan_text(hostile), "ok")
    except InvalidRequest as refused:
        assert refused.field == "prompt"  # noqa: PT017
    assert_exact(session)


def test_an_answer_that_is_nested_too_deeply_is_traced_all_the_same(sandbox: TemplateSandbox) -> None:
    session = played(sandbox, WRITES_CALLS)
    nested = '{"a":' * 900 + "1" + "}" * 900
    (answer,) = session.ask([user()], f'<tool_call>{{"name":"f","arguments":{nested}}}</tool_call>')
    with pytest.raises(InvalidRequest, match="nested too deeply"):
        session.ask([user(), answer, user()], "ok")
    assert len(assert_exact(session).branches) == 1
