"""A session whose model is a script: it samples texts in odd tokenizations, and a ledger keeps what it sampled."""

import json
import random
import re
from itertools import count
from typing import Any

import numpy as np
from msgspec import Struct

from ebbtide.gateway.model import ServedModel
from ebbtide.gateway.sessions.book import PlannedTurn, SessionBook
from ebbtide.gateway.sessions.trace import SessionTrace, session_trace
from ebbtide.gateway.templates import TemplateSandbox
from ebbtide.types.tokens import TOKEN, TokenArray
from tests.fakes.model_texts import START, served_model, tokenizers

Message = dict[str, Any]

_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)

_OPEN = "{{ s }}assistant\n"
#: ChatML. `s` is the marker that begins a turn, which differs by tokenizer.
CHATML = (
    "{% for m in messages %}{{ s + m.role + '\n' + m.content + eos_token + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}" + _OPEN + "{% endif %}"
)
#: Reasoning is rendered behind the last message of the user alone, as Qwen3's template does.
STRIPS_REASONING = (
    "{% set ns = namespace(last=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{{ s + m.role + '\n' }}"
    "{% if m.reasoning and loop.index0 > ns.last %}{{ '<think>' + m.reasoning + '</think>' }}{% endif %}"
    "{{ m.content + eos_token + '\n' }}{% endfor %}{% if add_generation_prompt %}" + _OPEN + "{% endif %}"
)
#: Tool calls are written from their values, so in other JSON than the model wrote.
WRITES_CALLS = (
    "{% if tools %}{{ s + 'system\n' + (tools | tojson) + eos_token + '\n' }}{% endif %}"
    "{% for m in messages %}{{ s + m.role + '\n' + m.content }}{% for c in m.tool_calls %}"
    "{{ '\n<tool_call>\n' + ({'name': c.function.name, 'arguments': c.function.arguments} | tojson)"
    " + '\n</tool_call>' }}{% endfor %}{{ eos_token + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}" + _OPEN + "{% endif %}"
)
#: Messages are cut short once two others follow.
ALTERS_EARLIER = (
    "{% for m in messages %}{{ s + m.role + '\n' }}"
    "{{ m.content if loop.revindex <= 3 else m.content[:2] }}{{ eos_token + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}" + _OPEN + "{% endif %}"
)
#: Nothing ends a turn but the next one's name.
WITHOUT_ENDS = (
    "{% for m in messages %}{{ '\n' + m.role + ': ' + m.content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '\nassistant: ' }}{% endif %}"
)
TEMPLATES = {
    "chatml": CHATML,
    "strips reasoning": STRIPS_REASONING,
    "writes calls": WRITES_CALLS,
    "alters earlier": ALTERS_EARLIER,
    "without ends": WITHOUT_ENDS,
}


class Sampled(Struct, frozen=True):
    """What the engine was given and made."""

    prompt_ids: list[int]
    tokens: TokenArray


class PlayedSession:
    """Plays turns against a book, as a gateway does for its client."""

    def __init__(self, text: ServedModel, *, marker: str, seed: int = 0) -> None:
        self.text, self.book, self.draw = text, SessionBook(text), random.Random(seed)
        self.options = {"s": marker}
        self._numbers = count(1)
        #: As the coordinator has them: request id, rollout ids and record of each turn; and what engines made.
        self.stored: list[tuple[str, list[str], bytes]] = []
        self.ledger: dict[str, Sampled] = {}
        self.answers: dict[str, Message] = {}
        self.plans: list[PlannedTurn] = []
        self.asked: list[list[Message]] = []

    def ask(
        self,
        messages: list[Message],
        *responses: str,
        ended: bool = True,
        tools: list[dict[str, Any]] | None = None,
        book: SessionBook | None = None,
    ) -> list[Message]:
        """Sends a chat, to which the model says `responses`. Returns the answers as the client gets them."""
        book = book or self.book
        plan = book.plan_chat(messages, tools=tools, template_options=self.options)
        self.asked.append(list(messages))
        return [*self.submit(plan, *responses, ended=ended, book=book)]

    def submit(
        self, plan: PlannedTurn, *responses: str, ended: bool = True, book: SessionBook | None = None
    ) -> list[Message]:
        number = next(self._numbers)
        rollouts = [f"q-{number}-{index}" for index in range(len(responses))]
        self.stored.append((f"request {number}", rollouts, plan.record.packed()))
        self.plans.append(plan)
        for rollout, response in zip(rollouts, responses, strict=True):
            ids = self.odd_ids(response) + ([self.text.eos_ids[0]] if ended else [])
            self.ledger[rollout] = Sampled(plan.prompt_ids, self._tokens(ids))
            self.answers[rollout] = parsed(response)
        self.read(book or self.book, number)
        return [self.answers[one] for one in rollouts]

    def read(self, book: SessionBook, number: int) -> None:
        """Has a book read a stored turn and its tokens."""
        request, rollouts, record = self.stored[number - 1]
        book.add(number, request, rollouts, record)
        for one in rollouts:
            book.set_tokens(one, self.ledger[one].tokens)
            book.set_answer(one, self.answers[one])

    def another_gateways_book(self) -> SessionBook:
        """A book made from what is stored."""
        book = SessionBook(self.text)
        for number in range(1, len(self.stored) + 1):
            self.read(book, number)
        return book

    def odd_ids(self, text: str) -> list[int]:
        """Ids of a text as a model may sample it: cut anywhere, so seldom as the tokenizer would."""
        cuts = sorted(self.draw.sample(range(len(text) + 1), k=min(len(text), 1 + len(text) // 3)))
        pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        ids: list[int] = []
        for piece in pieces:
            ids += self.text.encode_following(piece, ids[-1] if ids else self.text.encode("\n", special=False)[-1])
        return ids

    def _tokens(self, ids: list[int]) -> TokenArray:
        """Each token's logprob is its own, so that it is known again wherever it turns up."""
        tokens = np.empty(len(ids), dtype=TOKEN)
        tokens["id"], tokens["version"] = ids, self.draw.randint(1, 5)
        tokens["logprob"] = [-self.draw.random() for _ in ids]
        return tokens

    def trace(self) -> SessionTrace:
        return session_trace(self.book)


def parsed(response: str) -> Message:
    """The message that a gateway makes of a response."""
    message: Message = {"role": "assistant"}
    reasoning, mark, content = response.partition("</think>")
    if mark:
        message["reasoning"] = reasoning.removeprefix("<think>")
    else:
        content = response
    calls = [json.loads(one) for one in _CALL.findall(content)]
    content = _CALL.sub("", content)
    if calls:
        content = content.rstrip("\n")
        message["tool_calls"] = [
            {
                "id": f"call_{number}",
                "type": "function",
                "function": {"name": one["name"], "arguments": json.dumps(one["arguments"], indent=1)},
            }
            for number, one in enumerate(calls)
        ]
    return {**message, "content": content}


def assert_exact(played: PlayedSession) -> SessionTrace:
    """Asserts what must hold of every session, whatever was matched. Returns its trace."""
    trace = played.trace()
    everything = [logprob for one in played.ledger.values() for logprob in one.tokens["logprob"].tolist()]
    trained: list[float] = []
    for branch in trace.branches:
        ids = [*branch.prompt_ids.tolist(), *branch.tokens["id"].tolist()]
        assert len(branch.tokens) == len(branch.loss_mask) == len(branch.sampled)
        assert not np.any(branch.loss_mask > branch.sampled)
        assert not np.any(branch.tokens["logprob"][branch.sampled == 0])
        trained += branch.tokens["logprob"][branch.loss_mask == 1].tolist()
        _assert_on_policy(played, ids, branch.tokens, branch.sampled, len(branch.prompt_ids))
    assert sorted(trained) == sorted(everything)  # each sampled token once, with its own logprob
    for turn, plan in zip(trace.turns, played.plans, strict=True):
        assert turn.prompt_ids.tolist() == plan.prompt_ids
        for completion in turn.completions:
            assert completion.tokens.tobytes() == played.ledger[completion.rollout_id].tokens.tobytes()
    return trace


def _assert_on_policy(
    played: PlayedSession, ids: list[int], tokens: TokenArray, sampled: np.ndarray[Any, Any], start: int
) -> None:
    """Each token that counts as sampled stands behind the very ids that it was sampled behind."""
    made = {
        float(logprob): (one, number)
        for one in played.ledger.values()
        for number, logprob in enumerate(one.tokens["logprob"])
    }
    for at in np.flatnonzero(sampled).tolist():
        one, number = made[float(tokens[at]["logprob"])]
        assert tokens[at] == one.tokens[number]
        assert ids[: start + at] == [*one.prompt_ids, *one.tokens["id"][:number].tolist()]


#: A tool, and a call of it that is spelled as templates do not: without spaces, in another order, 1.0 for 1.
TOOLS = [{"type": "function", "function": {"name": "search", "parameters": {"type": "object"}}}]
CALL = '<tool_call>{"arguments":{"q":"a b","n":[1,2],"x":{"z":1.0,"a":null}},"name":"search"}</tool_call>'


def played(
    sandbox: TemplateSandbox, template: str = CHATML, *, kind: str = "byte-level", seed: int = 0
) -> PlayedSession:
    text = served_model(tokenizers()[kind], sandbox, template=template)
    return PlayedSession(text, marker="<|user|>" if kind == "characters" else START, seed=seed)


def user(content: str = "Hello") -> Message:
    return {"role": "user", "content": content}


def rendered(session: PlayedSession, messages: list[Message], **options: Any) -> str:
    """What the template makes of messages, with the spaces that the tokenizer puts behind special tokens."""
    text = session.text.render(messages, tools=options.get("tools"), template_options=session.options)
    return session.text.decode(session.text.encode(text, special=False), skip_special=False)
