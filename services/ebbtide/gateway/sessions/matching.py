"""Finds which sampled tokens a prompt's text repeats, so that encoding never changes them. Pure.

Encoding the text of a conversation anew gives other ids than those sampled: a tokenizer cuts text its own way, and
templates write JSON their own way. So the ids of an earlier path stand for its text wherever that is certainly what
the client sent, and only what follows is encoded. What is not certain is encoded anew, and counted.

Histories are digested by what they mean, so that turns need not keep them. Two messages have the same digest if a
client that sends an answer back, unchanged but for its form, sends the same message: empty fields, ids of calls, and
the spelling of arguments in JSON make no difference. Any other field does.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any, Final

from msgspec import Struct

from ebbtide.errors import InvalidRequest
from ebbtide.gateway.model import ServedModel, call_arguments, reasoning_of, template_messages, without_reasoning
from ebbtide.gateway.sessions.token_tree import PathKey, TokenPrefix, TokenTree
from ebbtide.gateway.sessions.turns import TurnRecord

#: Braces that begin no JSON object. An answer with more of them counts as another one.
_MAX_BRACES: Final = 64
#: Ids before a response that its first character may depend on.
CONTEXT_IDS: Final = 8
_BYTES: Final = 16
#: The history before the first message.
NO_HISTORY: Final = bytes(_BYTES)


def message_digests(messages: list[dict[str, Any]]) -> list[bytes]:
    """Returns a digest of each message alone. Raises `InvalidRequest` naming `messages` for too deep nesting."""
    try:
        return [_digest(json.dumps(_meaning(one), sort_keys=True).encode()) for one in template_messages(messages)]
    except RecursionError:
        raise InvalidRequest("are nested too deeply", field="messages") from None


def _meaning(message: dict[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in message.items() if value not in (None, "", [], {})}
    if kept.get("role") != "assistant":
        return kept
    reasoning, kept = reasoning_of(kept), without_reasoning(kept)
    calls = [
        {"name": one["function"]["name"], "arguments": json_value(call_arguments(one["function"]["arguments"]))}
        for one in kept.pop("tool_calls", ())
    ]
    return kept | ({"reasoning": reasoning} if reasoning else {}) | ({"calls": calls} if calls else {})


def history_digests(digests: Sequence[bytes], *, after: bytes = NO_HISTORY) -> list[bytes]:
    """Returns for each message a digest of all messages up to it, from those of single messages."""
    found, last = [], after
    for one in digests:
        last = _digest(last + one)
        found.append(last)
    return found


def text_digest(text: bytes) -> bytes:
    """The digest of a text in UTF-8."""
    return _digest(text)


def prefix_digests(text: bytes, lengths: Sequence[int]) -> dict[int, bytes]:
    """Returns length -> digest of so many first bytes of `text`, for those of `lengths` that it has; in one pass."""
    found, state, at = {}, blake2b(digest_size=_BYTES), 0
    for length in sorted(set(lengths)):
        if length > len(text):
            break
        state.update(text[at:length])
        found[length], at = state.copy().digest(), length
    return found


def json_value(value: Any) -> Any:
    """Returns a JSON value with whole numbers as integers: JavaScript writes 1.0 as 1."""
    match value:
        case dict():
            return {key: json_value(one) for key, one in value.items()}
        case list():
            return [json_value(one) for one in value]
        case float() if value.is_integer():
            return int(value)
        case _:
            return value


def _digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=_BYTES).digest()


class EarlierAnswer(Struct, frozen=True, kw_only=True):
    """A completion as it was sampled. `text` and `text_bytes` are those of its turn's record."""

    prompt_ids: Sequence[int]
    sampled: Sequence[int]
    text: bytes
    text_bytes: int


def continued_ids(answer: EarlierAnswer, prompt: str, model: ServedModel) -> list[int] | None:
    """Returns the ids of a prompt that goes on behind an answer, or None if its text is not what was sampled.

    `prompt` is what the chat template made of all messages, of which the first are those of the answer's turn and the
    answer as the client got it. It must begin with the text that the model answered, and then with the answer up to
    an end token; in the answer, white space and the spelling of JSON may differ. A template that leaves out reasoning,
    or rewrites a message once others follow, asks for another prompt than the one that the model answered.
    """
    encoded = prompt.encode()
    if not answer.text_bytes or text_digest(encoded[: answer.text_bytes]) != answer.text:
        return None
    rest = encoded[answer.text_bytes :].decode()
    unended = without_ends(answer.sampled, model)
    said = response_text(answer.prompt_ids, unended, model)
    for end in model.eos_ids:
        text = model.token_text(end)
        at = rest.find(text) if text else -1
        if at >= 0 and _same_text(rest[:at], said):
            # Another end token that was sampled is not in the prompt's text.
            ids = [*answer.prompt_ids, *unended, end]
            return [*ids, *model.encode_following(rest[at + len(text) :], end)]
    if said and rest.startswith(said):  # no end token, or more of the template's before it
        ids = [*answer.prompt_ids, *unended]
        return [*ids, *model.encode_following(rest[len(said) :], ids[-1])]
    return None


def response_text(prompt_ids: Sequence[int], sampled: Sequence[int], model: ServedModel) -> str:
    """The text of sampled ids, special tokens included."""
    stream = model.detokenizer(prompt_ids[-CONTEXT_IDS:], skip_special=False, hidden_ends=())
    return stream.push(sampled) + stream.end()


def without_ends(sampled: Sequence[int], model: ServedModel) -> list[int]:
    """Sampled ids up to the tokens that end the response."""
    count = len(sampled)
    while count and sampled[count - 1] in model.eos_ids:
        count -= 1
    return list(sampled[:count])


def _same_text(left: str, right: str) -> bool:
    """Whether both are the same but for white space, and for how JSON objects in them are spelled."""
    if _dense(left) == _dense(right):
        return True
    spelled = _spelled(left), _spelled(right)
    return None not in spelled and spelled[0] == spelled[1]


def _spelled(text: str) -> str | None:
    """The text with its JSON objects in one spelling, and without white space around them; None if it has none."""
    decoder, parts, at, failed, objects = json.JSONDecoder(), list[str](), 0, 0, 0
    while (brace := text.find("{", at)) >= 0:
        try:
            value, after = decoder.raw_decode(text, brace)
            spelled = json.dumps(json_value(value), sort_keys=True, separators=(",", ":"))
        except (ValueError, RecursionError):
            failed += 1
            if failed > _MAX_BRACES:
                return None
            parts.append(_dense(text[at : brace + 1]))
            at = brace + 1
            continue
        objects += 1
        parts += [_dense(text[at:brace]), spelled]
        at = after
    return "".join(parts) + _dense(text[at:]) if objects else None


def _dense(text: str) -> str:
    return "".join(text.split())


class TextMatches:
    """Compares prompts with the texts of paths: a turn's prompt as it was rendered, and the text that was sampled."""

    def __init__(self, tree: TokenTree, records: Mapping[int, TurnRecord], model: ServedModel) -> None:
        self._tree, self._records, self._model = tree, records, model

    def longest(self, text: str, *, raw: bool) -> tuple[TokenPrefix, str]:
        """Returns the path's ids and the rest of `text`; no path and all of `text` if it begins with none.

        In a rendered chat (not `raw`), an answer counts only if the end of its turn follows: as a part of another
        answer its tokens would be cut where the client's text is not.
        """
        encoded = text.encode()
        best, matched = TokenPrefix(None, 0), 0
        found = prefix_digests(encoded, [record.text_bytes for record in self._records.values()])
        for number, record in sorted(self._records.items()):
            if not record.text_bytes or found.get(record.text_bytes) != record.text:
                continue
            for prefix, end in self._paths(number, encoded, record.text_bytes, raw=raw):
                if end > matched:
                    best, matched = prefix, end
        return best, encoded[matched:].decode()

    def _paths(self, number: int, text: bytes, at: int, *, raw: bool) -> Iterator[tuple[TokenPrefix, int]]:
        """Yields the turn's prompt, which ends at byte `at`, and its completions that follow; and where these end."""
        start = self._tree.prompt_length(number)
        yield TokenPrefix(PathKey(number), start), at
        context = self._tree.prompt(number)[-CONTEXT_IDS:].tolist()
        for key in self._tree.completions(number):
            sampled = self._tree.sampled(key).tolist()
            ended = without_ends(sampled, self._model)
            for ids in (sampled, ended):
                said = response_text(context, ids, self._model).encode()
                if said and text.startswith(said, at) and (raw or self._ends(sampled, ids, text, at + len(said))):
                    yield TokenPrefix(key, start + len(ids)), at + len(said)

    def _ends(self, sampled: list[int], ids: list[int], text: bytes, at: int) -> bool:
        """Whether an answer is complete: its end token is among `ids`, or was not sampled and is at byte `at`."""
        if len(sampled) > len(without_ends(sampled, self._model)):
            return len(ids) == len(sampled)
        return any(text.startswith(self._model.token_text(end).encode(), at) for end in self._model.eos_ids)
