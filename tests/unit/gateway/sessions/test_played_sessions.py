"""Clients that play at random: each sampled token is trained once, in the context that it was sampled in."""

import random

import pytest

from ebbtide.gateway.sessions import trace as module_of_traces
from ebbtide.gateway.sessions.trace import session_trace, trace_page
from ebbtide.gateway.templates import TemplateSandbox
from tests.fakes.played_sessions import (
    CALL,
    STRIPS_REASONING,
    TEMPLATES,
    TOOLS,
    WRITES_CALLS,
    Message,
    PlayedSession,
    assert_exact,
    played,
    rendered,
)

KINDS = ("byte-level", "fallback", "characters")


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
        if self.draw.random() < 0.1:  # given up before a token came
            self.session.ask(self.chat, "", ended=False, tools=tools)
            return
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
        assert_pages_join(session, draw.randint(1, 4))


def assert_pages_join(session: PlayedSession, most: int) -> None:
    """Pages of a trace have all turns once, and all branches as the whole trace has them."""
    whole, pages = session.trace(), [trace_page(session.book, 0, most)]
    while pages[-1].more:
        pages.append(trace_page(session.book, pages[-1].turns[-1].turn.number, most))
    assert all(len(page.turns) <= most for page in pages)
    assert [turn.turn.number for page in pages for turn in page.turns] == [turn.turn.number for turn in whole.turns]
    branches = [branch for page in pages for branch in page.branches]
    assert [(one.leaf, one.rollouts, one.packed()) for one in branches] == [
        (one.leaf, one.rollouts, one.packed()) for one in whole.branches
    ]
    assert {(page.unmatched, page.unknown) for page in pages} == {(whole.unmatched, whole.unknown)}


def test_pages_up_to_one_turn_join_though_a_turn_is_added_between_them(sandbox: TemplateSandbox) -> None:
    session = played(sandbox, TEMPLATES[next(iter(TEMPLATES))], kind="byte-level", seed=1)
    agent = Agent(session, TEMPLATES[next(iter(TEMPLATES))], random.Random(1))
    for _ in range(6):
        agent.turn()
    whole, first = session.trace(), trace_page(session.book, 0, 3)
    assert (first.until, first.more) == (6, True)
    for _ in range(3):
        agent.turn()
    second = trace_page(session.book, 3, 9, first.until)
    assert ([turn.turn.number for turn in second.turns], second.until, second.more) == ([4, 5, 6], 6, False)
    assert [(one.leaf, one.packed()) for page in (first, second) for one in page.branches] == [
        (one.leaf, one.packed()) for one in whole.branches
    ]
    assert (second.unmatched, second.unknown) == (whole.unmatched, whole.unknown)


def test_a_page_ends_before_it_has_too_many_tokens_and_has_one_turn_at_least(
    sandbox: TemplateSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = played(sandbox, TEMPLATES[next(iter(TEMPLATES))], kind=KINDS[0], seed=1)
    agent = Agent(session, TEMPLATES[next(iter(TEMPLATES))], random.Random(1))
    for _ in range(6):
        agent.turn()
    assert len(trace_page(session.book, 0, 100).turns) == 6
    monkeypatch.setattr(module_of_traces, "_PAGE_TOKENS", 1)
    assert [len(trace_page(session.book, after, 100).turns) for after in range(7)] == [1, 1, 1, 1, 1, 1, 0]
