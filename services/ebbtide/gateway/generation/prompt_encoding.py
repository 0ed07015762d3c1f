"""Turns the prompts of a request into token ids, and checks that they fit the model."""

from collections.abc import Sequence
from typing import Final

import msgspec

from ebbtide.errors import InvalidRequest
from ebbtide.gateway.generation.text_request import ChatPrompt, IdsPrompt, Prompt, RawPrompt, TextRequest
from ebbtide.gateway.text.served_model import ServedModel
from ebbtide.types.run import Sampling, check_sampling

#: Most tokens of one completion that workers are asked for, as `Sampling.max_tokens` states it.
MAX_NEW_TOKENS: Final = 1 << 20


def encode_prompt(prompt: Prompt, model: ServedModel) -> list[int]:
    """The prompt's token ids. Takes milliseconds for a long text. Raises `InvalidRequest` naming the field."""
    match prompt:
        case IdsPrompt(ids):
            return ids
        case RawPrompt(text, special):
            return model.encode(text, special=special)
        case ChatPrompt():
            text = model.render(
                prompt.messages,
                tools=prompt.tools,
                template_options=prompt.template_options,
                generate=prompt.generate,
            )
            return model.encode(text, special=prompt.special)


def check_length(ids: Sequence[int], *, max_prompt_tokens: int, field: str) -> None:
    """Raise `InvalidRequest` for more tokens than a gateway takes in a prompt. `max_prompt_tokens` 0: no bound."""
    if max_prompt_tokens and len(ids) > max_prompt_tokens:
        raise InvalidRequest(f"has {len(ids)} tokens, more than this gateway's {max_prompt_tokens}", field=field)


def check_prompt(ids: Sequence[int], model: ServedModel, *, max_prompt_tokens: int, field: str) -> None:
    """Raise `InvalidRequest` for a prompt that no worker could continue. `max_prompt_tokens` 0: no bound."""
    if not ids:
        raise InvalidRequest("holds no token; there must be something to continue", field=field)
    check_length(ids, max_prompt_tokens=max_prompt_tokens, field=field)
    if len(ids) >= model.context:
        raise InvalidRequest(
            f"has {len(ids)} tokens, which leaves no room in the model's context of {model.context}", field=field
        )
    if not 0 <= min(ids) <= max(ids) < model.vocabulary:
        raise InvalidRequest(f"token ids are 0 to {model.vocabulary - 1} in this model's vocabulary", field=field)


def sampling_of(request: TextRequest, model: ServedModel, prompt_tokens: int) -> Sampling:
    """The sampling of one prompt's completions. Raises `InvalidRequest` naming the field.

    Stop strings stay here: the gateway finds them itself. Nobody reads logprobs outside a session that the answer does
    not show, and an engine makes tokens faster without.
    """
    room = model.context - prompt_tokens
    wanted = request.max_tokens
    if request.fits_context and wanted is not None:
        wanted = min(wanted, room, MAX_NEW_TOKENS)
    if wanted is not None and wanted > room:
        raise InvalidRequest(
            f"{wanted} and a prompt of {prompt_tokens} tokens exceed the model's context of "
            f"{model.context}; ask for at most {room}",
            field="max_tokens",
        )
    limit = min(room, MAX_NEW_TOKENS) if wanted is None else wanted
    unread = not (request.logprobs or request.session_id or request.prompt_logprobs is not None)
    sampling = msgspec.structs.replace(request.sampling, max_tokens=limit, without_logprobs=unread)
    try:
        return check_sampling(sampling, field="")
    except InvalidRequest as error:
        raise InvalidRequest(str(error).partition(": ")[2] or str(error), field=error.field.lstrip(".")) from None
