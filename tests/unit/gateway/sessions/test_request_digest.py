"""Digests of requests, which gateways of two builds compare while one replaces the other."""

from msgspec.structs import replace

from ebbtide.gateway.request import ChatPrompt, TextRequest, content_digest, request_digest
from ebbtide.types.run import Sampling

ASKED = TextRequest(
    model="spell",
    prompts=[ChatPrompt(messages=[{"role": "user", "content": "x"}])],
    sampling=Sampling(),
    max_tokens=9,
    request_id="one",
)


def test_a_request_has_the_digest_that_gateways_of_former_builds_make() -> None:
    """Else a client that repeats its request's id while gateways are replaced would be refused."""
    assert request_digest(ASKED).hex() == "e2b7b6cb92f770a0cea2b574cae6a0b2"
    assert content_digest(ASKED).hex() == "6d04c45ba7a6e65ff83c7f08ec41aec5"


def test_another_text_or_sampling_has_another_digest() -> None:
    others = [replace(ASKED, max_tokens=8), replace(ASKED, sampling=Sampling(temperature=0.5))]
    assert len({request_digest(one) for one in [ASKED, *others]}) == 3
    assert len({content_digest(one) for one in [ASKED, *others]}) == 3
    assert request_digest(replace(ASKED, stream=True)) != request_digest(ASKED)
    assert content_digest(replace(ASKED, stream=True)) == content_digest(ASKED)
