"""What a gateway counts and measures of its clients' requests."""

import httpx
import pytest
from prometheus_client import REGISTRY

from ebbtide.errors import Unavailable
from tests.fakes.scripted_rollouts import ScriptedSource

URL = "/v1/completions"
BODY = {"model": "spell-1", "prompt": "the dog", "max_tokens": 50}


class Counted:
    """What samples have grown by since this was made."""

    def __init__(self) -> None:
        self._before = self._all()

    def __call__(self, name: str, **labels: str) -> float:
        key = f"ebbtide_gateway_{name}", tuple(sorted(labels.items()))
        return self._all().get(key, 0.0) - self._before.get(key, 0.0)

    def _all(self) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
        samples = (sample for metric in REGISTRY.collect() for sample in metric.samples)
        return {(sample.name, tuple(sorted(sample.labels.items()))): sample.value for sample in samples}


@pytest.fixture
def counted() -> Counted:
    return Counted()


async def test_a_stream_has_one_first_token_and_gaps_between_its_parts(
    http: httpx.AsyncClient, source: ScriptedSource, counted: Counted
) -> None:
    await http.post(URL, json=BODY | {"stream": True})
    (rollout,) = source.submitted
    parts = -(-len(source.ids(rollout)[0]) // source.chunk)
    assert parts > 1
    assert counted("first_token_seconds_count") == 1
    assert counted("gap_seconds_count") == parts - 1
    assert counted("requests_total", method=URL, outcome="ok") == 1
    assert counted("streams") == 0


async def test_an_answer_that_comes_whole_is_no_stream(http: httpx.AsyncClient, counted: Counted) -> None:
    await http.post(URL, json=BODY)
    assert counted("first_token_seconds_count") == counted("gap_seconds_count") == 0
    assert counted("tokens_total") > 0


async def test_errors_are_counted_by_the_status_that_the_client_got(
    http: httpx.AsyncClient, source: ScriptedSource, counted: Counted
) -> None:
    assert (await http.post(URL, json=BODY | {"seed": 1})).status_code == 400
    assert (await http.get("/v1/models/no-such-run")).status_code == 404
    assert (await http.post(URL, json=BODY, headers={"authorization": "Bearer wrong"})).status_code == 401
    source.refusal = Unavailable("away")
    assert (await http.post(URL, json=BODY)).status_code == 503
    assert [counted("errors_total", status=status) for status in ("400", "401", "404", "503")] == [1, 1, 1, 1]
    assert counted("requests_total", method=URL, outcome="refused") == 2
    assert counted("requests_total", method=URL, outcome="failed") == 1
