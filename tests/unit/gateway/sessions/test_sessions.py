"""What a model sampled is never encoded again where a client sends it back, and each sampled token is trained once."""

import json
import random
from typing import Any

import pytest

from ebbtide.errors import Internal, NotReady
from ebbtide.gateway.sessions.session_book import SessionBook
from ebbtide.gateway.sessions.session_trace import session_trace
from ebbtide.gateway.sessions.turn_record import PromptOrigin
from ebbtide.gateway.text.template_sandbox import TemplateSandbox
from ebbtide.types.tokens import unpack_ids, unpack_tokens
from tests.fakes.model_texts import START, model_text, tokenizers
from tests.fakes.played_sessions import (
    ALTERS_EARLIER,
    CHATML,
    STRIPS_REASONING,
    TEMPLATES,
    WITHOUT_ENDS,
    WRITES_CALLS,
    Message,
    PlayedSession,
    assert_exact,
)

KINDS = ("byte-level", "fallback", "characters")
TOOLS = [{"type": "function", "function": {"name": "search", "parameters": {"type": "object"}}}]
#: Spelled as templates do not: no spaces, other order, escapes.
CALL = '<tool_call>{"arguments":{"q":"a b","n":[1,2],"x":{"z":1.0,"a":null}},"name":"search"}</tool_call>'


def played(
    sandbox: TemplateSandbox, template: str = CHATML, *, kind: str = "byte-level", seed: int = 0
) -> PlayedSession:
    text = model_text(tokenizers()[kind], sandbox, template=template)
    return PlayedSession(text, marker="<|user|>" if kind == "characters" else START, seed=seed)


def user(content: str = "Hello") -> Message:
    return {"role": "user", "content": content}


def rendered(session: PlayedSession, messages: list[Message], **options: Any) -> str:
    """What the template makes of messages, with the spaces that the tokenizer puts behind special tokens."""
    text = session.text.render(messages, tools=options.get("tools"), template_options=session.options)
    return session.text.decode(session.text.encode(text, special=False), skip_special=False)


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
    assert session.plans[1].record.origin is PromptOrigin.CONTINUED
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
    assert (len(trace.branches), trace.unknown) == (2, 1)


def test_a_template_that_alters_earlier_messages_makes_branches(sandbox: TemplateSandbox) -> None:
    session, chat = played(sandbox, ALTERS_EARLIER), [user("a long question")]
    for _ in range(3):
        chat += [*session.ask(chat, "a long answer"), user("another question")]
        assert session.text.decode(session.plans[-1].prompt_ids, skip_special=False) == rendered(session, chat[:-2])
    trace = assert_exact(session)
    assert len(trace.branches) > 1
    assert trace.unmatched > 0


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


WORDS = ("the dog", "Hello world", "1 2 3", "he said: no", " spaced  out ", "x", "lazy", "a\nb", "{", '"q"')


class Agent:
    """A client that plays at random: goes on, forks, retries, edits, compacts, and drops what it need not send."""

    def __init__(self, session: PlayedSession, template: str, draw: random.Random) -> None:
        self.session, self.template, self.draw = session, template, draw
        self.chat: list[Message] = [{"role": "system", "content": "s"}, self._user()]

    def turn(self) -> None:
        move = self.draw.choice(["on", "on", "on", "on", "fork", "retry", "edit", "compact", "interrupt"])
        answered = [at for at, one in enumerate(self.chat) if one["role"] == "assistant"]
        if answered and move == "fork":
            self.chat = [*self.chat[: self.draw.choice(answered) + 1], self._user()]
        elif answered and move == "edit":
            at = self.draw.randrange(len(self.chat))
            self.chat[at] = {**self.chat[at], "content": self._words()}
        elif answered and move == "compact":
            self.chat = [self.chat[0], self._user(), *self.chat[self.draw.choice(answered) :]]
        elif answered and move == "interrupt":
            last = self.chat[answered[-1]]
            self.chat[answered[-1]] = {**last, "content": last["content"][:3]}
        responses = [self._response() for _ in range(self.draw.choice([1, 1, 1, 2]))]
        tools = TOOLS if self.template is WRITES_CALLS else None
        answers = self.session.ask(self.chat, *responses, ended=self.draw.random() < 0.8, tools=tools)
        if move != "retry":
            back = dict(self.draw.choice(answers))
            if self.draw.random() < 0.2:
                back.pop("reasoning", None)
            self.chat = [*self.chat, back, self._user()]

    def _user(self) -> Message:
        return {"role": self.draw.choice(["user", "user", "tool"]), "content": self._words()}

    def _words(self) -> str:
        return " ".join(self.draw.choice(WORDS) for _ in range(self.draw.randint(1, 4)))

    def _response(self) -> str:
        words = self._words()
        if self.template is STRIPS_REASONING and self.draw.random() < 0.7:
            return f"<think>{self._words()}</think>{words}"
        return f"{words}\n{CALL}" if self.template is WRITES_CALLS and self.draw.random() < 0.5 else words


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("kind", KINDS)
def test_whatever_a_client_does_each_sampled_token_counts_once_and_in_its_context(
    kind: str, template: str, sandbox: TemplateSandbox
) -> None:
    draw = random.Random(f"{kind} {template}")
    for seed in range(2):
        session = played(sandbox, TEMPLATES[template], kind=kind, seed=seed)
        agent = Agent(session, TEMPLATES[template], draw)
        for _ in range(14):
            agent.turn()
            if template != "writes calls":  # there ids as sampled stand for JSON in another spelling
                shown = session.text.decode(session.plans[-1].prompt_ids, skip_special=False)
                asked = rendered(session, session.asked[-1])
                assert shown == asked
        assert_exact(session)
        other = session.another_gateways_book()
        plans = [
            book.plan_chat(agent.chat, tools=None, template_options=session.options) for book in (session.book, other)
        ]
        assert plans[0] == plans[1]
        assert [one.packed() for one in session_trace(other).branches] == [
            one.packed() for one in session.trace().branches
        ]
