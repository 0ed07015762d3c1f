"""Finds which sampled tokens a prompt's text repeats, so that encoding never changes them. Pure.

Encoding the text of a conversation anew gives other ids than those sampled: a tokenizer cuts text its own way, and
templates write JSON their own way. So the ids of an earlier path stand for its text wherever that is certainly what
the client sent, and only what follows is encoded. What is not certain is encoded anew, and counted.
"""

import json
from collections.abc import Sequence
from typing import Final

from msgspec import Struct

from ebbtide.gateway.model import ServedModel
from ebbtide.gateway.sessions.message_digests import json_value, text_digest

#: Braces that begin no JSON object. An answer with more of them counts as another one.
_MAX_BRACES: Final = 64
#: Ids before a response that its first character may depend on.
CONTEXT_IDS: Final = 8


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
