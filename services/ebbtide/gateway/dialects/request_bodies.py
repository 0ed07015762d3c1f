"""Types the supported fields that several routes share, and makes sampling and wishes of them."""

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from ebbtide.errors import InvalidRequest
from ebbtide.gateway.fields.openai_fields import STREAM_OPTION_FIELDS
from ebbtide.gateway.fields.sampling_fields import NO_RESUME
from ebbtide.gateway.generation.text_request import VersionWish
from ebbtide.types.parse import parse
from ebbtide.types.run import MAX_STOP_LENGTH, MAX_STOPS, Sampling

TokenId = Annotated[int, Meta(ge=0, lt=1 << 32)]
Count = Annotated[int, Meta(ge=1, le=1 << 20)]
Completions = Annotated[int, Meta(ge=1, le=1 << 16)]
#: As the coordinator's field for it.
Priority = Annotated[int, Meta(ge=-(1 << 31), lt=1 << 31)]
#: Whether logprobs are answered, where a number asks for them.
LogprobCount = Annotated[int, Meta(ge=0, le=1)]


class SamplingBody(Struct, kw_only=True):
    """Fields of sampling, under the names of OpenAI and vLLM."""

    temperature: Annotated[float, Meta(ge=0, le=100)] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Meta(ge=-1, lt=1 << 31)] = 0
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, Meta(gt=0, le=100)] = 1.0
    min_tokens: Annotated[int, Meta(ge=0, le=1 << 20)] = 0
    stop: str | list[str] = msgspec.field(default_factory=list)
    stop_token_ids: list[TokenId] = msgspec.field(default_factory=list)
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    seed: int | None = None

    def sampling(self, seed_field: str = "seed") -> Sampling:
        """Without stop strings and the bound on length, which the gateway sees to. Raises `InvalidRequest` naming
        `seed_field`, for a seed that would change something.
        """
        if self.seed is not None and self.temperature > 0:
            text = f"not supported: {NO_RESUME}; leave it out, or set temperature to 0"
            raise InvalidRequest(text, field=seed_field)
        return Sampling(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=max(0, self.top_k),
            min_p=self.min_p,
            min_tokens=self.min_tokens,
            stop_token_ids=tuple(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
            repetition_penalty=self.repetition_penalty,
        )

    def stops(self, field: str = "stop") -> tuple[str, ...]:
        """Raises `InvalidRequest` naming `field`."""
        stops = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        if len(stops) > MAX_STOPS:
            raise InvalidRequest(f"at most {MAX_STOPS} strings", field=field)
        if any(not 1 <= len(stop) <= MAX_STOP_LENGTH for stop in stops):
            raise InvalidRequest(f"a stop string has 1 to {MAX_STOP_LENGTH} characters", field=field)
        return stops


class WeightVersionBody(Struct, frozen=True, forbid_unknown_fields=True):
    min_version: Annotated[int, Meta(ge=0, lt=1 << 32)] = 0
    exact_version: Annotated[int, Meta(ge=0, lt=1 << 32)] = 0

    def wish(self) -> VersionWish:
        if self.min_version and self.exact_version:
            raise InvalidRequest("give min_version or exact_version, not both", field="weight_version")
        return VersionWish(min_version=self.min_version, exact_version=self.exact_version)


class SharedBody(SamplingBody, kw_only=True):
    """What else all of vLLM's routes take."""

    model: str = ""
    stream: bool = False
    stream_options: dict[str, Any] = msgspec.field(default_factory=dict)
    priority: Priority = 0
    request_id: str = ""
    session_id: str = ""
    return_token_ids: bool = False
    weight_version: WeightVersionBody = WeightVersionBody()


class StreamOptions(Struct, frozen=True):
    include_usage: bool = False
    continuous_usage_stats: bool = False


def stream_options(body: Mapping[str, Any], *, stream: bool) -> StreamOptions:
    """Raises `InvalidRequest` naming the field."""
    if body and not stream:
        raise InvalidRequest("is for streams; set stream, or leave it out", field="stream_options")
    return parse(StreamOptions, STREAM_OPTION_FIELDS.checked(body, inside="stream_options"))
